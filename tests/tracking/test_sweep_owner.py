"""Whether the process that runs a sweep still lives: asked of real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.run_folders import write_run
from zeroexp.cluster.code_snapshot import snapshot_code
from zeroexp.cluster.job import Job
from zeroexp.config.keys import ConfigError
from zeroexp.measure.memory import compile_allocator
from zeroexp.process import locks
from zeroexp.tracking import sweep_owner
from zeroexp.tracking.files import write_json
from zeroexp.tracking.run import SLURM_FILE, read_run
from zeroexp.tracking.sweep_owner import OWNER, Owner

TAKE = """
import sys, time
from pathlib import Path
from zeroexp.tracking import sweep_owner
sweep_owner.take_ownership(Path(sys.argv[1]))
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process owns the folder."""
    command = [sys.executable, "-c", TAKE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process
        process.kill()


def test_a_living_process_keeps_its_sweep_and_a_dead_one_loses_it(tmp_path, other):
    run = write_run(tmp_path / "run", status="running", num_steps=4)
    with pytest.raises(ConfigError, match=rf"process {other.pid} on \S+ runs its points; wait"):
        sweep_owner.take_ownership(tmp_path)
    assert read_run(run).status == "running"
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the table
    assert read_run(run).status == "cancelled"
    other.wait()
    assert read_run(run).status == "cancelled"
    assert f"process {other.pid} " in (read_run(run).reason or "")
    write_json(run / SLURM_FILE, {"job_id": "17"})
    assert read_run(run).status == "running", "Slurm goes on with it"
    sweep_owner.take_ownership(tmp_path)
    sweep_owner.release_ownership(tmp_path)
    assert not (tmp_path / OWNER).exists()


def test_the_lock_decides_and_not_the_pid(tmp_path: Path) -> None:
    """A living process of that number is another one if nobody holds the lock."""
    write_json(tmp_path / OWNER, asdict(Owner(socket.gethostname(), os.getpid(), locked=True)))
    died = f"{Owner.of(tmp_path)}, which ran it, has died"
    assert sweep_owner.death_of_owner(tmp_path / "run") == died
    sweep_owner.take_ownership(tmp_path)
    sweep_owner.take_ownership(tmp_path)
    assert sweep_owner.death_of_owner(tmp_path / "run") is None
    sweep_owner.release_ownership(tmp_path)


def test_a_file_system_without_locks_costs_a_line_where_it_matters(tmp_path, monkeypatch):
    """What the kernel answers on Lustre without `flock` and on some of FUSE."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    run = write_run(tmp_path / "run", status="running", num_steps=4)
    sweep_owner.take_ownership(tmp_path)
    assert read_run(run).status == "running"
    # as another process, or this one after it was killed
    monkeypatch.setattr(sweep_owner, "_owned", {})
    assert read_run(run).status == "running", "nobody knows better"
    with pytest.raises(
        ConfigError, match=r"ran its points, and no lock tells .* remove (\S+)"
    ) as no:
        sweep_owner.take_ownership(tmp_path)
    Path(str(no.value).rpartition(" ")[2]).unlink()
    sweep_owner.take_ownership(tmp_path)
    sweep_owner.release_ownership(tmp_path)
    assert not (tmp_path / OWNER).exists()


def test_of_another_host_nothing_is_known(tmp_path: Path) -> None:
    write_json(tmp_path / OWNER, asdict(Owner("another-host", 2**22 + 1, locked=True)))
    with pytest.raises(ConfigError, match="if that machine is gone, remove "):
        sweep_owner.take_ownership(tmp_path)
    assert sweep_owner.death_of_owner(tmp_path / "run") is None


# -- what a killed process leaves behind -------------------------------------------------------------

KEEP = """
from time import sleep
from zeroexp.process import locks
with locks.temporary_folder() as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sleep(600)
"""
DIE_BESIDE = """
import os, sys
from pathlib import Path
from zeroexp.process import locks
with locks.temporary_folder(Path(sys.argv[1])):
    os.kill(os.getpid(), 9)
"""
DIE = """
import os, sys
from pathlib import Path
from zeroexp.tracking import attempt, sweep_owner
Path.replace = lambda *_: os.kill(os.getpid(), 9)
sweep = Path(sys.argv[1])
attempt.begin(sweep / "run", 1) if sys.argv[2] == "attempt" else sweep_owner.take_ownership(sweep)
"""


def test_a_temporary_folder_is_removed_by_the_next_process_if_its_own_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "zeroexp-of-another-version").mkdir()
    folders: list[Path] = []
    with ExitStack() as at_end:
        processes: list[subprocess.Popen[str]] = []
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", KEEP],
                env={**os.environ, "TMPDIR": str(tmp_path)},
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(at_end.enter_context(process))
            at_end.callback(process.kill)
            assert process.stdout is not None
            folders.append(Path(process.stdout.readline().strip()))
        killed, living = folders
        processes[0].kill()
        processes[0].wait()
        assert (killed / "file").exists()
        with locks.temporary_folder() as own:
            assert not killed.exists() and (living / "file").exists() and own.exists()
        assert not own.exists()
    assert (tmp_path / "zeroexp-of-another-version").exists()


def test_a_temporary_folder_of_another_host_is_left_alone(tmp_path, monkeypatch):
    """Its lock may be seen there alone (Lustre's localflock, NFS's local_lock)."""
    with monkeypatch.context() as there:
        another = f"{socket.gethostname()}-0001"
        there.setattr("socket.gethostname", lambda: another)
        there.setattr("fcntl.flock", lambda *_: None)
        with locks.temporary_folder(tmp_path) as living:
            there.undo()
            with locks.temporary_folder(tmp_path):
                assert living.exists()
    assert not any(tmp_path.iterdir())


def test_a_file_system_that_keeps_open_files_has_its_temporary_folders_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS and FUSE rename a file that is open to .nfs…, when it is removed, and refuse to remove its folder."""
    unlink = os.unlink

    def rename_open(path: str, *, dir_fd: int | None = None) -> None:
        folder = Path.cwd() if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
        of_all = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        if str(folder / path) in [os.readlink(fd) for fd in of_all if fd.is_symlink()]:
            (folder / path).rename((folder / path).with_name(".nfs0001"))
        else:
            unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", rename_open)
    with locks.temporary_folder(tmp_path) as folder:
        (folder / "file").touch()
    assert not any(tmp_path.iterdir())


def test_what_a_killed_process_was_making_beside_its_place_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the code, and what a compiler writes; of an export in tests/test_export_command.py."""
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "false")
    for parent, make in (
        (tmp_path / "sweep" / ".code", lambda: snapshot_code(tmp_path / "sweep")),
        (tmp_path / "cache" / f"allocator-{os.geteuid()}", compile_allocator),
    ):
        parent.mkdir(parents=True, mode=0o700)
        died = subprocess.run([sys.executable, "-c", DIE_BESIDE, str(parent)])
        assert died.returncode == -signal.SIGKILL and len([*parent.iterdir()]) == 2
        make()
        assert [*parent.glob(".*")] == []


def test_what_a_killed_process_was_writing_is_removed_by_the_next_start(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", status="running", num_steps=4)
    for writing in ("attempt", "owner"):
        died = subprocess.run([sys.executable, "-c", DIE, str(tmp_path), writing])
        assert died.returncode == -signal.SIGKILL
    assert len([*run.glob(".attempts.json.*")]) == len([*tmp_path.glob(".owner.json.*[0-9]")]) == 1
    sweep_owner.take_ownership(tmp_path)
    Job(run).put_back()
    assert [*run.glob(".*.json.*"), *tmp_path.glob(".owner.json.*[0-9]")] == []
    sweep_owner.release_ownership(tmp_path)
