"""A rank that hangs is found, named and asked where it stands: real training, whose rank 1 is stopped or sleeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import rank_code
from tests.test_rank import log_of, make_job, process_of
from zeroexp.cluster.local import LocalCluster
from zeroexp.process import progress
from zeroexp.process.watchdog.hung import Idle, Sight, ranks_behind
from zeroexp.tracking.files import read_records

HANG_SECONDS = 5  # ranks of a busy machine must advance meanwhile


def test_a_stopped_rank_is_named_and_leaves_its_stack(local: LocalCluster, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", train__steps=1_000_000, cluster__hang_s=HANG_SECONDS)
    stopped: list[int] = []

    def stop_rank_1() -> None:
        if not stopped and len(read_records(job.folder)) >= 3:
            stopped.append(process_of(job, 1))
            os.kill(stopped[0], signal.SIGSTOP)

    outcome = local.run(job, meanwhile=stop_rank_1)
    cause = outcome.cause
    assert outcome.status == "failed" and cause is not None
    assert (cause["rank"], cause["exception"]) == (1, "Hang")
    assert (
        f"process {process_of(job, 1)} was stopped from outside (SIGSTOP): find what"
        in cause["message"]
    )
    assert "(cluster.hang_s)" in cause["message"]
    for rank in (0, 1):
        _, asked, stack = log_of(job, rank).partition(f" rank {rank}: no progress for ")
        # It may stand outside of the loop, where it writes a record.
        assert asked and "zeroexp/run/rank.py" in stack and "most recent call first" in stack


def test_a_rank_that_never_comes_to_the_first_step_is_named(local, tmp_path):
    """Both processes sleep: rank 0 waits for it in a collective, and was blamed, ten minutes later."""
    job = make_job(tmp_path / "run", cluster__hang_s=2)
    rank_code.choose(job.folder, "tests.cluster.hanging_ranks:sleep_while_building")
    outcome = local.run(job)
    cause = outcome.cause
    assert cause is not None and (cause["rank"], cause["exception"]) == (1, "Hang"), cause
    assert " in the building of the model; " in cause["message"]
    for rank, at in ((0, "rank.py"), (1, "hanging_ranks.py")):
        assert at in log_of(job, rank).partition(f" rank {rank}: no progress for ")[2]


@pytest.mark.parametrize("slow", ["sync_slowly", "load_slowly"])
@pytest.mark.parametrize("implementation", ["buffer", "torch"])
def test_ranks_wait_for_one_that_saves_or_loads_for_any_time(local, tmp_path, implementation, slow):
    job = make_job(
        tmp_path / "run",
        strategy__implementation=implementation,
        train__steps=2,
        train__warmup_steps=0,
        checkpoint__every=1,
        cluster__hang_s=None,
    )
    rank_code.choose(job.folder, f"tests.cluster.hanging_ranks:{slow}")
    outcome = local.run(job)
    assert outcome.status == "done", outcome


def test_a_process_is_idle_only_while_it_does_nothing() -> None:
    """It computes or reads when it is told to, and idles between."""
    code = "for line in iter(input, ''): exec(line)"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, text=True, bufsize=1
    ) as child:
        assert child.stdin is not None
        try:
            idle = Idle(child.pid)
            await_sleep(child.pid)
            idle.look(1)
            assert [idle.look(1), idle.look(1)] == [1, 2]
            print("open('/proc/self/stat').read()", file=child.stdin)
            await_word(idle)
            await_sleep(child.pid)
            idle.look(1)
            assert idle.look(1) > 0
        finally:
            child.kill()


def await_sleep(pid: int) -> None:
    while "S (sleeping)" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8"):
        time.sleep(0.01)


def await_word(idle: Idle) -> None:
    while idle.look(1):
        time.sleep(0.01)


def sight(rank: int, done: tuple[int, int, int], seconds: float, **other: str) -> Sight:
    values = {"phase": progress.FORWARD, "state": "S", "kernel": "futex_wait", **other}
    return Sight(rank, "here", 100 + rank, done, seconds=seconds, **values)


ENDED = {"phase": progress.AFTER}
STARTS = {"phase": progress.BEFORE}
MEETS = {"phase": progress.MEETING}
BUILDS = {"phase": progress.BUILDING}
CASES = {
    "all wait for the one that did less": ([sight(0, (7, 2, 5), 9), sight(1, (7, 2, 4), 9)], [1]),
    "a step counts more than its phases": ([sight(0, (7, 1, 0), 9), sight(1, (6, 9, 99), 9)], [1]),
    "one of them still advances": ([sight(0, (7, 2, 5), 9), sight(1, (7, 2, 4), 1)], []),
    "a stopped one is guilty wherever it is": (
        [sight(0, (7, 2, 4), 9), sight(1, (7, 2, 5), 9, state="T")],
        [1],
    ),
    "while a debugger holds one, nobody is": (
        [sight(0, (7, 2, 5), 9), sight(1, (7, 2, 4), 9, state="t")],
        [],
    ),
    "nobody is behind": ([sight(0, (7, 2, 4), 9), sight(1, (7, 2, 4), 9)], [0, 1]),
    "loading may take any time": (
        [sight(0, (0, 0, 0), 0, **STARTS), sight(1, (0, 0, 0), 0, **STARTS)],
        [],
    ),
    "but not nothing at all": (
        [sight(0, (0, 2, 1), 9, **BUILDS), sight(1, (0, 2, 0), 9, **BUILDS)],
        [1],
    ),
    "who has met waits for one that loads": (
        [sight(0, (0, 1, 0), 900, **MEETS), sight(1, (0, 0, 0), 0, **STARTS)],
        [],
    ),
    "one never comes to where they meet": (
        [sight(0, (0, 1, 0), 900, **MEETS), sight(1, (0, 0, 0), 9, **STARTS)],
        [1],
    ),
    "none of them can meet": (
        [sight(0, (0, 1, 0), 9, **MEETS), sight(1, (0, 1, 0), 9, **MEETS)],
        [0, 1],
    ),
    "but not stopped": (
        [sight(0, (0, 0, 0), 0, **STARTS), sight(1, (0, 0, 0), 9, **STARTS, state="T")],
        [1],
    ),
    "one never comes to its first step": (
        [sight(0, (0, 1, 2), 9), sight(1, (0, 0, 0), 0, **STARTS)],
        [1],
    ),
    "saving may take any time": (
        [sight(0, (20, 1, 0), 0, phase=progress.SAVING, state="D"), sight(1, (20, 3, 2), 900)],
        [],
    ),
    "but not a peer of one that saves": (
        [sight(0, (20, 3, 0), 0, phase=progress.SAVING), sight(1, (20, 2, 2), 9)],
        [1],
    ),
    "whoever is done waits for nobody": (
        [sight(0, (8, 1, 0), 0, **ENDED), sight(1, (7, 4, 0), 9)],
        [1],
    ),
    "all are done": ([sight(0, (8, 1, 0), 900, **ENDED)], []),
}


@pytest.mark.parametrize("name", CASES)
def test_who_is_behind(name: str) -> None:
    sights, guilty = CASES[name]
    read = [Sight.read(each.line()) for each in sights]
    assert read == sights
    assert [each.rank for each in ranks_behind(read, hang_seconds=5)] == guilty
