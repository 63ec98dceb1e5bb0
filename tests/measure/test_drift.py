"""What rises is named and what only scatters is not: counted against permutations, then on drawn series.

The noise is that of step times as they are measured: a log-normal of which a part is carried on from step to step, one
step in thirty between 1.2 and 5 times as long, and a load that comes for twenty steps and goes. Seeds are fixed.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, permutations
from math import exp
from pathlib import Path
from typing import Any

import pytest

from tests import rank_code
from tests.run_folders import record
from tests.test_rank import log_of, make_job
from zeroexp.config.keys import save
from zeroexp.measure.drift import (
    CHANCE,
    OBJECTS,
    STEP_TIME,
    chance_of,
    read_between_steps,
    rising,
    slope_of_rise,
)
from zeroexp.measure.record import StepRecord
from zeroexp.measure.summary import summarise, summarise_rank
from zeroexp.tracking.files import read_summary

STEPS = 300
PLAIN = record(0, warmup=False)


def run(
    seed: int,
    *,
    steps: int = STEPS,
    scatter: float = 0.02,
    carry: float = 0.0,
    load: float = 1.1,
    slower: float = 0.0,  # share of a step's time in each step
    leaked_bytes: float = 0.0,
    leaked_objects: float = 0.0,
    collected: float = 0.0,  # seconds of garbage collection that each step adds to all later ones
) -> list[StepRecord]:
    """The records of a drawn run of `steps` measured steps."""
    draw = random.Random(seed)
    carried, load_from = 0.0, draw.randrange(steps)
    made: list[StepRecord] = []
    for step in range(steps):
        carried = carry * carried + draw.gauss(0, scatter * (1 - carry**2) ** 0.5)
        seconds = 0.1 * exp(carried) * (1 + slower * step)
        seconds *= draw.uniform(1.2, 5) if draw.random() < 1 / 30 else 1
        seconds *= load if load_from <= step < load_from + 20 else 1
        rests = {}
        if step % 10 == 0:  # objects of cycles wait for the collector, which comes when it likes
            rests = {
                "resting_bytes": int(2**24 + leaked_bytes * step),
                "num_objects": int(200_000 + draw.uniform(0, 700) + leaked_objects * step),
                "collection_seconds": draw.choice([0, 0, 1e-4, 0.02]) + collected * step,
            }
        made.append(replace(PLAIN, step=step, step_seconds=seconds, **rests))
    return made


@pytest.mark.parametrize("number", range(1, 8))
def test_the_chance_of_a_score_is_that_share_of_all_orders(number: int) -> None:
    scores = [
        sum((b > a) - (b < a) for a, b in combinations(order, 2))
        for order in permutations(range(number))
    ]
    for least in {*scores, max(scores) + 1}:
        share = sum(score >= least for score in scores) / len(scores)
        assert chance_of(least, number) == pytest.approx(share, abs=1e-12)


def test_eight_windows_are_the_fewest_that_can_tell() -> None:
    assert [chance_of(n * (n - 1) // 2, n) <= CHANCE for n in (6, 7, 8)] == [False, False, True]
    assert slope_of_rise([(step, 3.0 * step) for step in range(8)]) == 3.0
    assert slope_of_rise([(step, 3.0 * step) for step in range(7)]) == 0.0
    assert slope_of_rise([(step, -3.0 * step) for step in range(30)]) == 0.0


@pytest.mark.parametrize(
    "drawn",
    [
        *({"scatter": scatter, "carry": carry} for scatter in (0.01, 0.1) for carry in (0.0, 0.5)),
        *({"steps": steps} for steps in (20, 90, 1000)),
    ],
)
def test_no_alarm_in_a_hundred_calm_runs_however_they_scatter(drawn: dict[str, Any]) -> None:
    assert [rising(run(seed, **drawn)) for seed in range(100)] == [{}] * 100


@pytest.mark.parametrize(
    ("scatter", "load", "rise", "least"),
    [(0.01, 1.0, 1e-4, 100), (0.01, 1.1, 1e-4, 95), (0.02, 1.0, 1e-4, 85), (0.1, 1.0, 6e-4, 85)],
)
def test_one_percent_in_a_hundred_steps_is_named_within_three_hundred(scatter, load, rise, least):
    """Where steps scatter by 10 %, it takes six times as much."""
    runs = (run(seed, scatter=scatter, load=load, slower=rise) for seed in range(100))
    found = [rising(each) for each in runs]
    assert sum(STEP_TIME in each for each in found) >= least
    assert {what for each in found for what in each} == {STEP_TIME}


def test_ten_objects_a_step_are_named_within_three_hundred_steps() -> None:
    found = [rising(run(seed, leaked_objects=10)) for seed in range(100)]
    assert [{*each} for each in found] == [{OBJECTS}] * 100
    assert rising(run(7, leaked_objects=10))[OBJECTS] == "rise by 10 a step"


def test_memory_and_garbage_collection_that_rise_are_named() -> None:
    leak = rising(run(1, leaked_bytes=2**24 / 10_000))
    assert leak == {"memory between steps": "rises by 0.99 % per 100 steps"}
    slow = rising(run(1, collected=1e-3))
    assert [*slow] == ["garbage collection"]


def test_what_rises_and_stays_is_no_trend() -> None:
    """Caches that fill in the first tenth of a run."""
    steps = run(3)
    for each in steps:
        each.resting_bytes = each.resting_bytes and 2**24 + 2**16 * min(each.step, 30)
    assert rising(steps) == {}


def test_warm_up_traced_steps_and_what_nobody_read_count_in_nothing() -> None:
    steps = run(5, slower=1e-4, leaked_objects=10)
    for each in steps:
        each.warmup = each.step < 200
        each.traced = each.step % 2 == 0
        each.step_seconds = 99.0 + each.step if each.traced else 0.1
        each.num_objects = None
    assert rising(steps) == {}


def test_the_summary_names_the_first_rank_that_drifts() -> None:
    calm, leaks = run(1), run(2, leaked_objects=10)
    ranks = [summarise_rank(rank, steps) for rank, steps in enumerate((calm, leaks, leaks))]
    assert summarise(calm, ranks).drift == {OBJECTS: "rise by 11 a step, rank 1"}


def test_every_tenth_step_reads_what_rests_and_counts_objects() -> None:
    before, between, after, kept = record(9), record(10), record(19), []
    read_between_steps(before, lambda: 7)
    read_between_steps(between, lambda: 7)
    kept.extend(object() for _ in range(10_000))
    read_between_steps(after, lambda: 7)
    assert before.resting_bytes == 7 and before.collection_seconds
    assert (between.resting_bytes, between.num_objects) == (None, None)
    assert before.num_objects and after.num_objects
    assert 10_000 <= after.num_objects - before.num_objects < 10_500


@pytest.mark.slow
def test_the_rank_that_keeps_ten_objects_of_each_step_is_named(local, tmp_path: Path) -> None:
    """And so the rank before it keeps nothing, of which the first to drift is named."""
    keeper = "tests.measure.watched_main:keeper"
    found = drift_of_real_run(local, tmp_path, "zero3", keeper)
    # Its records are one a step, Python's lists take a block now and then, and what else a process drops is noise.
    assert found[OBJECTS] in {f"rise by {num} a step, rank 1" for num in range(8, 14)}
    assert "memory between steps" not in found


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["ddp", "zero3"])
def test_real_runs_keep_nothing_of_their_steps(local, tmp_path: Path, stage: str) -> None:
    found = drift_of_real_run(local, tmp_path, stage, "zeroexp.run.rank:main")
    assert {"memory between steps", OBJECTS}.isdisjoint(found)


def drift_of_real_run(local: Any, folder: Path, stage: str, main: str) -> dict[str, str]:
    job = make_job(folder / "run", strategy__name=stage, train__steps=STEPS)
    if stage == "zero3":
        config = job.config
        rows = (config.strategy.parameters, config.strategy.gradients, config.strategy.optimizer)
        for row in rows:
            row.placement = "shard"
        save(config, job.folder / "config.yaml")
    rank_code.choose(job.folder, main)
    assert local.run(job).status == "done", log_of(job, 0)
    summary = read_summary(job.folder)
    return summary.drift
