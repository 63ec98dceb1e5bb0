"""Whole or not there: names, the rename, what is kept, and which attempt may commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import MANIFEST, CheckpointError
from zeroexp.tracking.json_files import write_json


def write(run: Path, step: int, attempt: int = 0) -> Path:
    """A checkpoint complete but for its rename."""
    folder = folders.unfinished_folder(run, step, attempt)
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")
    return folder


def commit(run: Path, step: int, attempt: int = 0) -> Path:
    write(run, step, attempt)
    return folders.commit(run, step, attempt)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / folders.FOLDER).iterdir())


def test_nothing_is_whole_before_its_rename(tmp_path):
    folders.register_attempt(tmp_path, 0)
    write(tmp_path, 20)
    assert folders.newest_checkpoint(tmp_path) is None
    folders.commit(tmp_path, 20, 0)
    assert folders.newest_checkpoint(tmp_path) == tmp_path / "checkpoint" / "step-000020"


def test_the_newest_has_most_steps(tmp_path):
    folders.register_attempt(tmp_path, 0)
    for step in (5, 1_000_000, 999_999):
        commit(tmp_path, step)
    assert [folders.step_of(path) for path in folders.complete_checkpoints(tmp_path)] == [
        5,
        999_999,
        1_000_000,
    ]


def test_what_has_another_name_or_no_manifest_is_none(tmp_path):
    folders.register_attempt(tmp_path, 0)
    for name in ("step-000003", "step-abc", "step-000004.bak", ".step-000005.0"):
        (tmp_path / "checkpoint" / name).mkdir()
    (tmp_path / "checkpoint" / "step-abc" / MANIFEST).write_text("{}")
    assert folders.complete_checkpoints(tmp_path) == []


def test_older_ones_go(tmp_path):
    folders.register_attempt(tmp_path, 0)
    for step in (2, 4, 6):
        commit(tmp_path, step)
    folders.keep_newest(tmp_path, 2)
    assert names(tmp_path) == [".attempt", "step-000004", "step-000006"]


def test_one_that_a_run_waits_for_stays_until_that_run_has_ended(tmp_path):
    run, waiting = tmp_path / "run", tmp_path / "waiting"
    for folder in (run, waiting):
        folder.mkdir()
    folders.register_attempt(run, 0)
    for step in (2, 4, 6):
        commit(run, step)
    folders.pin(run / "checkpoint" / "step-000002", waiting)
    for status, kept in (("pending", [2, 6]), ("running", [2, 6]), ("failed", [6])):
        write_json(waiting / "state.json", {"status": status, "reason": None})
        folders.keep_newest(run, 1)
        assert [folders.step_of(path) for path in folders.complete_checkpoints(run)] == kept
    assert names(run) == [".attempt", "step-000006"]


def test_who_pins_removes_the_pins_of_runs_that_have_ended_and_those_cut_short(tmp_path):
    """The run that saved them may have ended, and removes none; a writer may be killed before it has said its name."""
    run, waiting, killed, dead = (tmp_path / name for name in ("run", "waiting", "killed", "dead"))
    for folder in (run, waiting, killed, dead):
        folder.mkdir()
    folders.register_attempt(run, 0)
    for step in (2, 4):
        commit(run, step)
    for checkpoint, held_by in (("step-000002", killed), ("step-000004", waiting)):
        folders.pin(run / "checkpoint" / checkpoint, held_by)
    write_json(killed / "state.json", {"status": "cancelled", "reason": None})
    (run / "checkpoint" / ".pin.step-000002.cut").touch()
    folders.pin(run / "checkpoint" / "step-000004", dead)
    pins = [name for name in names(run) if name.startswith(".pin.")]
    assert len(pins) == 2 and all(name.startswith(".pin.step-000004.") for name in pins)


def test_the_next_start_removes_what_is_unfinished_or_half_removed(tmp_path):
    folders.register_attempt(tmp_path, 0)
    commit(tmp_path, 2)
    write(tmp_path, 4)
    (tmp_path / "checkpoint" / ".step-000001.leaving").mkdir()
    folders.register_attempt(tmp_path, 0)
    assert names(tmp_path) == [".attempt", "step-000002"]


def test_what_stands_already_is_left_as_it_is(tmp_path):
    folders.register_attempt(tmp_path, 0)
    (commit(tmp_path, 2) / "first").touch()
    commit(tmp_path, 2)
    assert (tmp_path / "checkpoint" / "step-000002" / "first").exists()
    assert names(tmp_path) == [".attempt", "step-000002"]


def test_an_outdated_attempt_can_not_commit(tmp_path):
    folders.register_attempt(tmp_path, 1)
    write(tmp_path, 4, attempt=1)
    folders.register_attempt(tmp_path, 2)
    with pytest.raises(FileNotFoundError):  # its folder is gone, however late it looks
        folders.commit(tmp_path, 4, 1)
    write(tmp_path, 6, attempt=1)
    with pytest.raises(CheckpointError, match="attempt 2 of this run has begun"):
        folders.commit(tmp_path, 6, 1)
    with pytest.raises(CheckpointError, match="attempt 2 of this run has begun"):
        folders.register_attempt(tmp_path, 1)
    assert folders.complete_checkpoints(tmp_path) == []
    assert commit(tmp_path, 6, attempt=2).exists()
