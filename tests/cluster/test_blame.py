"""Which of several dead ranks is the cause, and that nothing of them is left open. Real processes, which do nothing."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

from tests.descriptors import open_now
from zeroexp.cluster.supervise import end_processes, supervise
from zeroexp.process.watchdog.hung import WatchedRank
from zeroexp.tracking.json_files import read_json

# "ended by": an exit code, or a signal as a negative number
CASES = [
    ([1, -signal.SIGKILL], 1),  # killed: rank 0 met the consequence
    ([-signal.SIGKILL, 1], 0),
    ([-signal.SIGABRT, -signal.SIGKILL], 1),  # C++ aborts on a peer that is lost
    ([0, 3, 1], 2),
    ([1, 1], 0),
    ([0, -signal.SIGSEGV, -signal.SIGABRT], 1),
]


def dead(rank: int, ended_by: int) -> WatchedRank:
    """A process that has ended already, and that nobody has asked about yet."""
    how = f"os.kill(os.getpid(), {-ended_by})" if ended_by < 0 else f"os._exit({ended_by})"
    process = subprocess.Popen([sys.executable, "-S", "-c", f"import os; os.setpgid(0, 0); {how}"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    process.returncode = 0  # who supervises reaps it
    return WatchedRank(rank, process.pid, memoryview(b""), Path())


@pytest.mark.parametrize(("ended_by", "guilty"), CASES)
def test_of_ranks_that_died_together_the_first_cause_is_told(tmp_path, ended_by, guilty):
    before = open_now()
    ours, theirs = Pipe()
    with ours, theirs:
        ranks = [dead(rank, how) for rank, how in enumerate(ended_by)]
        assert supervise(ranks, tmp_path, ours, timeout_seconds=60) == "failed"
        end_processes(ranks)
    cause = read_json(tmp_path / "failure.json")
    assert cause is not None and cause["rank"] == guilty
    assert not open_now() - before


def test_ranks_are_supervised_beyond_descriptor_1023(tmp_path: Path) -> None:
    """Each rank has two."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2048:
        pytest.skip("needs 2048 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    try:
        ours, theirs = Pipe()
        high = Connection(fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, 1024))
        with ours, theirs, high:
            assert supervise([dead(0, 0)], tmp_path, high, timeout_seconds=60) == "done"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
