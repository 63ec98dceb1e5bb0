"""Whose word stands in failure.json when several have one."""

import json
import signal

import pytest

from zeroexp.tracking import failure


@pytest.mark.parametrize(
    "deaths",
    [
        (signal.SIGKILL, signal.SIGTERM),
        (signal.SIGKILL, signal.SIGABRT),
        (signal.SIGTERM, signal.SIGKILL),
    ],
)
def test_a_killed_rank_is_the_cause_and_who_ends_because_of_it_is_not(tmp_path, deaths):
    for rank, number in enumerate(deaths):
        failure.write_died(tmp_path, rank, -number)
    assert json.loads((tmp_path / failure.FAILURE).read_text())["exception"] == "SIGKILL"
