"""A run's state and its reason never contradict each other: each word of Slurm beside all that a run may have left."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.cluster.test_slurm_words import make_job
from zeroexp.cluster.job import Ending, Job, ending_of, first_cause, reason_of
from zeroexp.cluster.slurm_state import RUNS, WAITS, Sighting, conclude_state
from zeroexp.cluster.task import ENDED, PREEMPTED, TIME_LIMIT
from zeroexp.tracking import failure
from zeroexp.tracking.files import write_json

CAUSE = r"rank 1 on \S+: ArithmeticError: not a number \(.*\)"
# Ours raises the second, where another test has put the counting allocator into this process.
MEMORY = r"rank 1 on \S+: (RuntimeError|OutOfMemoryError): out of memory: .*"
LIMIT = r"time limit of 3600 s \(cluster\.timeout_s\)"
DEADLINE = r"its deadline came \(cluster\.slurm\.sbatch\.deadline\)"
UNSTARTED = r"cancelled in Slurm before it began on node1 \(sinfo -R may say why\)"
SLURMS_LIMIT = r"out of memory: Slurm's limit was reached \(node1\)"
NO_RESULT = "Slurm says no error, and no result either; see .*"
FORGOTTEN = "Slurm has forgotten the job, and it left no result"
AWAY = rf"{PREEMPTED} \(node1\)"
THIS_LIMIT = re.escape(TIME_LIMIT)


def raised(job: Job) -> None:
    failure.write_raised(job.folder, 1, ArithmeticError("not a number"))


def short_of_memory(job: Job) -> None:
    try:
        torch.empty(1 << 60)
    except RuntimeError as error:
        failure.write_raised(job.folder, 1, error, peak_bytes=1 << 30)


def result(job: Job, **more: object) -> None:
    write_json(job.folder / "summary.json", {"world_size": 1, **more})


def diverged(job: Job) -> None:
    result(job, diverged_at=7)


def noted(reason: str) -> Callable[[Job], None]:
    ended = {"number": 1, "began_at": 10.0, "ended_at": 15.0, "reason": reason}
    return lambda job: write_json(job.folder / "attempts.json", {"attempts": [ended]})


def words_of_batch_file(job: Job) -> None:
    write_json(job.folder / "slurm.json", {"job_id": "13"})
    (job.folder / "slurm").mkdir()
    (job.folder / "slurm" / "13_batch.err").write_text(
        "zeroexp: cluster.slurm.setup: exit code 1 of: ls\n"
    )


LEFT: dict[str, Callable[[Job], None]] = {
    "nothing": lambda job: None,
    "a result": result,
    "a result that diverged": diverged,
    "a failure": raised,
    "want of memory": short_of_memory,
    "a note of its time limit": noted(TIME_LIMIT),
    "a note of its end": noted(ENDED),
    "words of the batch file": words_of_batch_file,
}
# What Slurm says of an ended job -> what the run left -> its state and the whole of its reason.
FILES_DECIDE: dict[str, tuple[str, str | None]] = {
    "a result": ("done", None),
    "a result that diverged": ("done", "diverged at step 7"),
    "a failure": ("failed", CAUSE),
    "want of memory": ("out_of_memory", MEMORY),
    "a note of its time limit": ("timed_out", THIS_LIMIT),
    "a note of its end": ("failed", re.escape(ENDED)),
    "words of the batch file": ("failed", "cluster.slurm.setup: exit code 1 of: ls .*"),
}
PAIRS: dict[str | None, dict[str, tuple[str, str | None]]] = {
    None: {"nothing": ("failed", FORGOTTEN), **FILES_DECIDE},
    "COMPLETED": {"nothing": ("failed", NO_RESULT), **FILES_DECIDE},
    "FAILED": {"nothing": ("failed", r"Slurm says FAILED \(Why\); see .*"), **FILES_DECIDE},
    "CANCELLED": {
        **dict.fromkeys(LEFT, ("cancelled", UNSTARTED)),
        "words of the batch file": ("cancelled", "cancelled in Slurm"),
    },
    "TIMEOUT": dict.fromkeys(LEFT, ("timed_out", LIMIT)),
    "DEADLINE": dict.fromkeys(LEFT, ("timed_out", DEADLINE)),
    "NODE_FAIL": dict.fromkeys(LEFT, ("node_lost", r"node lost \(node1\)")),
    "BOOT_FAIL": dict.fromkeys(LEFT, ("node_lost", r"a node did not boot \(node1\)")),
    "PREEMPTED": dict.fromkeys(LEFT, ("failed", AWAY)),
    "OUT_OF_MEMORY": {
        **dict.fromkeys(LEFT, ("out_of_memory", SLURMS_LIMIT)),
        "a failure": ("out_of_memory", f"{SLURMS_LIMIT}: {CAUSE}"),
        "want of memory": ("out_of_memory", MEMORY),
    },
    **dict.fromkeys(RUNS, dict.fromkeys(LEFT, ("running", None))),
    **dict.fromkeys(WAITS, dict.fromkeys(LEFT, ("pending", "Why"))),
}


@pytest.mark.parametrize("left", LEFT)
def test_every_word_of_slurm_beside_what_a_run_left(tmp_path: Path, left: str) -> None:
    job = make_job(tmp_path)
    LEFT[left](job)
    for word, rows in PAIRS.items():
        seen = Sighting(word, "Why", "node1", preempted=False) if word else None
        assert_pair(conclude_state(job, seen), rows[left], f"{word}, {left}")


@pytest.mark.parametrize("left", LEFT)
def test_a_job_that_made_room_says_so_and_nothing_else(tmp_path: Path, left: str) -> None:
    job = make_job(tmp_path)
    LEFT[left](job)
    told: list[tuple[str, tuple[str, str | None]]] = [
        *((word, ("preempted", PREEMPTED)) for word in RUNS),
        *((word, ("failed", AWAY)) for word in ("FAILED", "PREEMPTED")),
    ]
    for word, expected in told:
        assert_pair(conclude_state(job, Sighting(word, "Why", "node1", True)), expected, word)


OF_THIS_MACHINE: dict[Ending, dict[str, tuple[str, str | None]]] = {
    "done": {"a result": ("done", None), "a result that diverged": ("done", "diverged at step 7")},
    "failed": {
        "nothing": ("failed", "nobody could write down why; see .*"),
        "a failure": ("failed", CAUSE),
        "want of memory": ("out_of_memory", MEMORY),
    },
    "timed_out": dict.fromkeys(("nothing", "a failure", "want of memory"), ("timed_out", LIMIT)),
    "cancelled": dict.fromkeys(
        ("nothing", "a failure"), ("cancelled", "the process that ran it hung up")
    ),
}


@pytest.mark.parametrize(
    ("ended", "left"),
    [(ended, left) for ended in OF_THIS_MACHINE for left in OF_THIS_MACHINE[ended]],
)
def test_every_end_on_this_machine(tmp_path: Path, ended: Ending, left: str) -> None:
    """Ranks that lost their peers while the job is ended write a failure too."""
    job = make_job(tmp_path)
    LEFT[left](job)
    status = ending_of(ended, job.failure)
    assert_pair((status, reason_of(status, job)), OF_THIS_MACHINE[ended][left], f"{ended}, {left}")


def test_no_pair_is_left_out() -> None:
    assert all(set(rows) == set(LEFT) for rows in PAIRS.values())
    assert len(list(product(PAIRS, LEFT))) == sum(map(len, PAIRS.values()))


def assert_pair(told: tuple[str, str | None], expected: tuple[str, str | None], what: str) -> None:
    (status, reason), (wanted, pattern) = told, expected
    assert status == wanted, (what, told)
    if pattern is None or reason is None:
        assert reason == pattern, (what, told)
    else:
        assert re.fullmatch(pattern, reason), (what, told)


def test_a_log_is_named_in_the_first_line_of_a_reason_which_is_all_that_a_table_shows() -> None:
    failure = {"rank": 1, "host": "node1", "exception": "RuntimeError", "log": "logs/rank1.log"}
    line = first_cause({**failure, "message": "no state\n  of layer 0\n  of layer 1"})
    assert line == (
        "rank 1 on node1: RuntimeError: no state (logs/rank1.log)\n  of layer 0\n  of layer 1"
    )
