"""`--json` of the verbs that say something to people: one object alone on standard output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_folders import write_run
from zeroexp import __main__ as sweeps
from zeroexp import export, sync, watch
from zeroexp.process.json_output import json_alone

# watch opens a store: a warning that ended the set-up of mlflow's tables would end that of every later test.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def call(monkeypatch, capsys):
    """Call a verb's main with words and --json: its exit code, its object, and what it says to people."""

    def of(module, *words: str):
        monkeypatch.setattr(sys, "argv", ["zeroexp", *words, "--json"])
        code = module.main()
        printed = capsys.readouterr()
        return code, json.loads(printed.out), printed.err

    return of


@pytest.mark.slow
def test_watch_says_what_a_report_says(call, tmp_path: Path) -> None:
    for name in ("ddp", "zero3"):
        write_run(tmp_path / "sweep" / name, name)
    code, told, said = call(watch, str(tmp_path / "sweep"), "--once")
    assert code == 0 and [point["point"] for point in told["points"]] == ["ddp", "zero3"]
    assert "tokens/s" in said, "the table"
    code, told, said = call(watch, str(tmp_path / "none"))
    assert (code, told) == (2, None) and "no run in there" in said


def test_sync_and_export_say_what_they_did(call, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sweep/ddp", "ddp")
    code, told, said = call(sync, str(tmp_path / "none"))
    assert (code, told) == (2, None) and "no run in there" in said
    code, told, said = call(export, str(folder))
    assert (code, told) == (2, None) and "no whole checkpoint in there" in said


def test_a_refused_line_is_null_and_its_reason_is_for_people(call) -> None:
    code, told, said = call(sweeps, "data.seq_len=0")
    assert (code, told) == (2, None) and said.startswith("zeroexp: data.seq_len=0")


def test_what_a_command_of_the_user_prints_is_for_people_too(capfd) -> None:
    """As that of events.tell."""
    with json_alone(True) as told:
        subprocess.run(["echo", "a word"], check=True)
        told.append("{}")
    assert capfd.readouterr() == ("{}\n", "a word\n")
