"""Whole or not there: names, the rename, what is kept, and which attempt may commit."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import MANIFEST, CheckpointError
from zeroexp.config.keys import ConfigError
from zeroexp.tracking.json_files import write_json


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder whose first attempt has begun."""
    (tmp_path / "run").mkdir()
    folders.clear_unfinished(tmp_path / "run", 0)
    return tmp_path / "run"


def begin(run: Path, attempt: int) -> None:
    """As `attempt.begin`, which is for one process, and what its ranks do first."""
    write_json(run / "attempts.json", {"attempts": [{"number": attempt, "began_at": 0.0}]})
    folders.clear_unfinished(run, attempt)


def write(run: Path, step: int, attempt: int = 0) -> None:
    """A checkpoint complete but for its rename."""
    folder = folders.unfinished_folder(run, step, attempt)
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")


def commit(run: Path, *steps: int, attempt: int = 0) -> None:
    for step in steps:
        write(run, step, attempt)
        folders.commit(run, step, attempt)


def steps_of(run: Path) -> list[int]:
    return [folders.step_of(path) for path in folders.complete_checkpoints(run)]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / folders.FOLDER).iterdir())


def test_a_checkpoint_is_a_renamed_folder_with_a_manifest_and_the_newest_has_most_steps(run):
    write(run, 20)
    for name in ("step-000003", "step-abc", "step-000004.bak"):
        (run / "checkpoint" / name).mkdir()
    (run / "checkpoint" / "step-abc" / MANIFEST).write_text("{}")
    assert steps_of(run) == [] and folders.newest_checkpoint(run) is None
    folders.commit(run, 20, 0)
    commit(run, 5, 1_000_000, 999_999)
    assert steps_of(run) == [5, 20, 999_999, 1_000_000]
    assert folders.newest_checkpoint(run) == run / "checkpoint" / "step-1000000"


def test_older_ones_go(run):
    commit(run, 2, 4, 6)
    folders.keep_newest(run, 2)
    assert names(run) == ["step-000004", "step-000006"]


def test_a_pin_that_vanishes_or_can_not_be_read_ends_no_save(run, tmp_path):
    commit(run, 2, 4, 6)
    (run / "checkpoint" / ".pin.step-000002.gone").symlink_to(tmp_path / "nowhere")  # is not there
    (run / "checkpoint" / ".pin.step-000004.unread").mkdir()
    folders.keep_newest(run, 1)
    assert steps_of(run) == [4, 6]


def test_one_that_a_run_waits_for_stays_until_that_run_has_ended(run, tmp_path):
    (tmp_path / "waiting").mkdir()
    commit(run, 2, 4, 6)
    folders.pin(run / "checkpoint" / "step-000002", tmp_path / "waiting")
    for status, kept in (("pending", [2, 6]), ("running", [2, 6]), ("failed", [6])):
        write_json(tmp_path / "waiting" / "state.json", {"status": status, "reason": None})
        folders.keep_newest(run, 1)
        assert steps_of(run) == kept
    assert names(run) == ["step-000006"]


def test_one_that_is_read_stays_until_its_reader_is_done_or_dead(run):
    commit(run, 2, 4, 6)
    (run / "checkpoint" / ".pin.step-000004.host.1").touch()  # nobody locks it
    with folders.kept(run / "checkpoint" / "step-000002"):
        folders.keep_newest(run, 1)
        assert steps_of(run) == [2, 6]
    folders.keep_newest(run, 1)
    assert names(run) == ["step-000006"]


def test_one_on_a_file_system_that_is_read_alone_is_read(run, monkeypatch):
    """There unlink says so of a file that is not there, too."""
    commit(run, 2)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        patch.setattr(folders.locks, "take", refuse)
        with folders.kept(run / "checkpoint" / "step-000002"):
            assert names(run) == ["step-000002"]


def test_a_pin_of_a_run_whose_sweep_can_not_be_read_holds(run, tmp_path):
    (tmp_path / "sweep/waiting").mkdir(parents=True)
    commit(run, 2, 4)
    folders.pin(run / "checkpoint" / "step-000002", tmp_path / "sweep/waiting")
    write_json(tmp_path / "sweep/waiting/state.json", {"status": "pending", "reason": None})
    (tmp_path / "sweep/owner.json").touch()  # as a power cut leaves it
    folders.keep_newest(run, 1)
    assert steps_of(run) == [2, 4]


def test_a_pin_is_never_seen_without_its_name(run, tmp_path, monkeypatch):
    """Else who looks takes its writer for one that was killed, and removes it."""
    (tmp_path / "waiting").mkdir()
    write_json(tmp_path / "waiting/state.json", {"status": "pending", "reason": None})
    commit(run, 2, 4)
    opens = Path.open

    def open_while_another_looks(path: Path, mode: Any = "r", **words: Any) -> Any:
        file = opens(path, mode, **words)
        for pin in (run / "checkpoint").glob(".pin.*") if mode == "wb" else ():
            folders._holds(pin)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_while_another_looks)
        folders.pin(run / "checkpoint" / "step-000002", tmp_path / "waiting")
    folders.keep_newest(run, 1)
    assert steps_of(run) == [2, 4]


def test_who_pins_removes_the_pins_of_runs_that_have_ended_and_those_cut_short(run, tmp_path):
    """The run that saved them may have ended, and removes none; a writer may be killed before it has said its name."""
    waiting, killed, dead = (tmp_path / name for name in ("waiting", "killed", "dead"))
    commit(run, 2, 4)
    for folder, step in ((killed, 2), (waiting, 4)):
        folder.mkdir()
        folders.pin(run / "checkpoint" / f"step-00000{step}", folder)
    write_json(killed / "state.json", {"status": "cancelled", "reason": None})
    (run / "checkpoint" / ".pin.step-000002.cut").touch()
    dead.mkdir()
    folders.pin(run / "checkpoint" / "step-000004", dead)
    pins = [name for name in names(run) if name.startswith(".pin.")]
    assert len(pins) == 2 and all(name.startswith(".pin.step-000004.") for name in pins)


def test_the_next_start_removes_what_is_unfinished_or_half_removed(run):
    commit(run, 2)
    write(run, 4)
    (run / "checkpoint" / ".step-000001.leaving").mkdir()
    folders.clear_unfinished(run, 0)
    assert names(run) == ["step-000002"]


def test_an_older_attempt_that_still_writes_does_not_end_the_new_one(run, monkeypatch):
    write(run, 4)
    rmdir = os.rmdir

    def write_on(path: str, *, dir_fd: int | None = None) -> None:
        (folders.unfinished_folder(run, 4, 0) / "late").touch()
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", write_on)
    begin(run, 1)
    monkeypatch.undo()
    begin(run, 2)
    assert names(run) == []


def test_one_that_is_there_already_is_left_as_it_is(run):
    commit(run, 2)
    (run / "checkpoint" / "step-000002" / "first").touch()
    commit(run, 2)
    assert (run / "checkpoint" / "step-000002" / "first").exists()
    assert names(run) == ["step-000002"]


def test_an_outdated_attempt_can_not_commit(run):
    begin(run, 1)
    write(run, 4, attempt=1)
    begin(run, 2)
    with pytest.raises(FileNotFoundError):  # its folder is gone, however late it looks
        folders.commit(run, 4, 1)
    write(run, 6, attempt=1)
    for late in (lambda: folders.commit(run, 6, 1), lambda: folders.clear_unfinished(run, 1)):
        with pytest.raises(CheckpointError, match="attempt 2 of this run has begun"):
            late()
    assert steps_of(run) == []
    commit(run, 6, attempt=2)
    assert steps_of(run) == [6]


def test_a_damaged_record_of_attempts_costs_no_checkpoint(run, capsys):
    (run / "attempts.json").touch()  # as a power cut leaves it
    commit(run, 2)
    assert steps_of(run) == [2]
    assert capsys.readouterr().err.startswith(f"{run / 'attempts.json'}: ")


class FullDisk(io.RawIOBase):
    left = 704

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.left -= len(content)
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(content)


@pytest.mark.parametrize("with_cause", [True, False])
def test_a_file_that_torch_can_not_close_is_told_as_a_full_disk(with_cause, tmp_path):
    """Its writer in C++ says where it wanted to be; torch.distributed.checkpoint loses what that came of."""
    with pytest.raises(RuntimeError) as of_torch:
        torch.save({"w": torch.ones(1000)}, FullDisk())
    failed = of_torch.value
    assert isinstance(failed.__context__, OSError)
    if not with_cause:
        failed.__context__ = None
    line = f"--to={tmp_path}/x: No space left on device; make room there, or set --to"
    with pytest.raises(ConfigError, match=line), folders.filled_or_removed(tmp_path / "x"):
        raise failed


def test_another_failure_is_no_full_disk(tmp_path):
    with pytest.raises(RuntimeError, match="ours"), folders.filled_or_removed(tmp_path / "y"):
        raise RuntimeError("ours")
    assert not [*tmp_path.iterdir()]
