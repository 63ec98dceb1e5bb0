"""Whether the process that answers for a run still lives: asked of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from zeroexp.tracking.link import Link


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def link_to(pid: int | None) -> Link:
    return Link.to("sqlite:////x/mlflow.db", "1", "abc", pid)


def test_a_link_comes_back_from_its_folder(tmp_path: Path) -> None:
    assert Link.read(tmp_path) is None
    link = link_to(os.getpid())
    link.write(tmp_path)
    assert Link.read(tmp_path) == link


def test_a_living_process_keeps_its_run(sleeper: subprocess.Popen[bytes]) -> None:
    assert not link_to(os.getpid()).orphaned()
    assert not link_to(sleeper.pid).orphaned()


def test_a_killed_process_leaves_its_run_as_a_zombie_and_when_reaped(
    sleeper: subprocess.Popen[bytes],
) -> None:
    link = link_to(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the table
    assert link.orphaned()
    sleeper.wait()
    assert link.orphaned()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="pids are told apart by /proc")
def test_a_later_process_with_the_same_pid_is_another() -> None:
    assert replace(link_to(os.getpid()), process_started="1").orphaned()


def test_only_the_own_host_and_a_named_process_can_be_judged(
    sleeper: subprocess.Popen[bytes],
) -> None:
    link = link_to(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert not replace(link, host="another-host").orphaned()
    assert not link_to(None).orphaned()
