"""Whose word stands in failure.json when several have one."""

import json
import signal
from pathlib import Path

import pytest

from zeroexp.tracking import failure


def cause(folder: Path) -> str:
    return json.loads((folder / failure.FAILURE).read_text())["exception"]


@pytest.mark.parametrize("consequence", [signal.SIGTERM, signal.SIGABRT])
def test_who_is_ended_because_of_a_killed_rank_is_not_the_cause(tmp_path, consequence):
    failure.write_died(tmp_path, 1, -signal.SIGKILL)
    failure.write_died(tmp_path, 0, -consequence)
    assert cause(tmp_path) == "SIGKILL"


def test_a_killed_rank_is_the_cause_of_what_its_peers_said_first(tmp_path):
    failure.write_died(tmp_path, 0, -signal.SIGTERM)
    failure.write_died(tmp_path, 1, -signal.SIGKILL)
    assert cause(tmp_path) == "SIGKILL"
