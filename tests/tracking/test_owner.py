"""Whether the process that runs a sweep still lives: asked of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.run_folders import write_run
from zeroexp.config import ConfigError
from zeroexp.tracking import owner
from zeroexp.tracking.files import write_json
from zeroexp.tracking.owner import OWNER, Owner
from zeroexp.tracking.run import SLURM_FILE, read_run

TAKE = """
import sys, time
from pathlib import Path
from zeroexp.tracking import owner
owner.take_ownership(Path(sys.argv[1]))
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


def test_a_living_process_keeps_its_sweep_and_a_dead_one_loses_it(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    run = write_run(tmp_path / "run", status="running", num_steps=4)
    with pytest.raises(ConfigError, match=rf"process {other.pid} on \S+ runs its points; wait"):
        owner.take_ownership(tmp_path)
    assert read_run(run).status == "running"
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the table
    assert read_run(run).status == "cancelled"
    other.wait()
    assert read_run(run).status == "cancelled"
    assert f"process {other.pid} " in (read_run(run).reason or "")
    write_json(run / SLURM_FILE, {"job_id": "17"})
    assert read_run(run).status == "running", "Slurm goes on with it"
    owner.take_ownership(tmp_path)
    owner.release_ownership(tmp_path)
    assert not (tmp_path / OWNER).exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="pids are told apart by /proc")
def test_a_later_process_with_the_same_pid_is_another(tmp_path: Path) -> None:
    write_json(tmp_path / OWNER, asdict(replace(Owner.of_this_process(), started="1")))
    owner.take_ownership(tmp_path)
    assert Owner.of(tmp_path) == Owner.of_this_process()


def test_of_another_host_nothing_is_known(tmp_path: Path) -> None:
    write_json(tmp_path / OWNER, asdict(Owner("another-host", 2**22 + 1, "1")))
    with pytest.raises(ConfigError, match="if that machine is gone, remove "):
        owner.take_ownership(tmp_path)
    assert owner.is_abandoned(tmp_path / "run") is None
