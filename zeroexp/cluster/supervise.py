"""Supervise the processes of one job from their fork until all have ended."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from zeroexp.cluster.job import Ending
from zeroexp.process.watchdog.hung import LOOK_SECONDS, WatchedRank, dump_stacks, find_hang
from zeroexp.tracking import failure
from zeroexp.tracking.out_of_memory import kills_by_kernel

GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL


def supervise(
    ranks: list[WatchedRank],
    folder: Path,
    control: Connection,
    timeout_seconds: float,
    hang_seconds: float | None = None,
) -> Ending:
    """Wait until all ranks are done, one failed, all hang, the time is over, or the sweep hung up."""
    deadline, kills = time.monotonic() + timeout_seconds, kills_by_kernel()
    pause = min(LOOK_SECONDS, math.inf if hang_seconds is None else hang_seconds / 4)
    while alive := _alive(ranks):
        left = max(0.0, deadline - time.monotonic())
        # select.select ends at descriptor 1023.
        ready = wait([control, *(rank.fileno() for rank in alive)], min(left, pause))
        if not ready and time.monotonic() >= deadline:
            return "timed_out"
        if not ready and hang_seconds is not None:
            sights = [rank.look(pause) for rank in alive]
            if hang := find_hang(sights, hang_seconds):
                failure.write_hung(folder, *hang)
                dump_stacks(alive, sights)
                return "failed"
        if control in ready:
            return "cancelled"
        if failed := [rank for rank in alive if rank.fileno() in ready and rank.reap() != 0]:
            # A killed one (status < 0) precedes those that lost it.
            first = min(failed, key=lambda rank: (rank.status, rank.rank))
            failure.write_died(
                folder, first.rank, first.status, peak_bytes=first.peak_bytes, kills_before=kills
            )
            return "failed"
    return "done"


def end_processes(ranks: list[WatchedRank]) -> None:
    """End these ranks, each the leader of its process group, with all processes that they started."""
    _signal(ranks, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while (alive := _alive(ranks)) and time.monotonic() < deadline:
        ready = wait([rank.fileno() for rank in alive], deadline - time.monotonic())
        for rank in [rank for rank in alive if rank.fileno() in ready]:
            rank.reap()
    _signal(ranks, signal.SIGKILL)
    for rank in _alive(ranks):
        rank.reap()


def _signal(ranks: list[WatchedRank], number: int) -> None:
    for rank in _alive(ranks):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, number)


def _alive(ranks: list[WatchedRank]) -> list[WatchedRank]:
    return [rank for rank in ranks if rank.status is None]
