"""Supervise the processes of one job from their fork until all have ended."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from zeroexp.cluster.job import Ending
from zeroexp.process.watchdog.hung import LOOK_SECONDS, HangWatch, WatchedRank
from zeroexp.tracking import failure
from zeroexp.tracking.out_of_memory import kills_by_kernel

GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL


@dataclass
class Rank:
    """One forked process, the leader of its own process group."""

    rank: int
    pid: int
    pidfd: int
    watched: WatchedRank  # how far it is
    status: int | None = None  # exit code, or minus the signal; None while it lives
    peak_bytes: int | None = None  # peak resident memory; None while it lives

    def fileno(self) -> int:
        return self.pidfd

    def reap(self) -> int:
        _, status, used = os.wait4(self.pid, 0)
        self.peak_bytes = used.ru_maxrss * 1024
        self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def signal(self, number: int) -> None:
        """Send a signal to the rank and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def supervise(
    ranks: list[Rank],
    folder: Path,
    control: Connection,
    timeout_seconds: float,
    hang_seconds: float | None = None,
) -> Ending:
    """Wait until all ranks are done, one failed, all hang, the time is over, or the sweep hung up."""
    deadline, kills = time.monotonic() + timeout_seconds, kills_by_kernel()
    pause = math.inf if hang_seconds is None else min(LOOK_SECONDS, hang_seconds / 4)
    watch = HangWatch(hang_seconds, pause, partial(failure.write_hung, folder))
    while alive := _alive(ranks):
        left = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([control, *alive], [], [], min(left, pause))
        if not ready and time.monotonic() >= deadline:
            return "timed_out"
        if not ready and watch.is_due:
            watch.look([rank.watched for rank in alive])
            if watch.judge():
                watch.leave_stacks()
                return "failed"
        if control in ready:
            return "cancelled"
        ended = [rank for rank in alive if rank in ready]
        failed = [rank for rank in ended if rank.reap() != 0]
        if failed:
            _tell(folder, failed, out_of_memory=kills_by_kernel() > kills)
            return "failed"
    return "done"


def _tell(folder: Path, failed: list[Rank], *, out_of_memory: bool) -> None:
    """Report the first of the ranks that ended together: a killed one (status < 0) precedes those that lost it."""
    first = min(failed, key=lambda rank: (rank.status, rank.rank))
    status, peak = first.status or 0, first.peak_bytes
    failure.write_died(folder, first.rank, status, peak_bytes=peak, out_of_memory=out_of_memory)


def end_processes(ranks: list[Rank]) -> None:
    for rank in _alive(ranks):
        rank.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while (alive := _alive(ranks)) and time.monotonic() < deadline:
        ready, _, _ = select.select(alive, [], [], deadline - time.monotonic())
        for rank in ready:
            rank.reap()
    for rank in _alive(ranks):
        rank.signal(signal.SIGKILL)
        rank.reap()
    for rank in ranks:
        os.close(rank.pidfd)


def _alive(ranks: list[Rank]) -> list[Rank]:
    return [rank for rank in ranks if rank.status is None]
