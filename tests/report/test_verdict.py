"""Verdicts over runs: their four states, and how often they are wrong where the truth is known."""

from __future__ import annotations

import math
import random
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from zeroexp.report.statistics import (
    MARGIN,
    NUM_RESAMPLES,
    Comparison,
    Verdict,
    compare_step_times,
    judge_interval,
    num_needed,
)


def against_one(*ratios: float, num_comparisons: int = 1) -> Comparison:
    """Compare runs that took so many seconds with runs of one second."""
    found = compare_step_times(
        dict(enumerate(ratios)),
        dict.fromkeys(range(len(ratios)), 1.0),
        num_comparisons=num_comparisons,
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((0.80, 0.81, 0.79), Verdict.FASTER),
        ((1.25, 1.24, 1.27), Verdict.SLOWER),
        ((1.001, 0.999, 1.002), Verdict.SAME),
        ((1.010, 1.011, 1.009), Verdict.SAME),  # surely slower, and surely by less than 2 %
        ((0.80, 1.20, 0.95), Verdict.OPEN),
        ((0.50, 0.50), Verdict.OPEN),  # two runs say nothing of their scatter
    ],
)
def test_the_four_states(ratios: tuple[float, ...], verdict: Verdict) -> None:
    assert against_one(*ratios).verdict is verdict


def test_runs_of_one_round_are_compared_with_each_other() -> None:
    """The machine slowed down by half from round to round; within a round the ratio is always 0.9."""
    reference = {0: 1.0, 1: 1.5, 2: 2.25}
    other = {number: 0.9 * seconds * (1 + 0.001 * number) for number, seconds in reference.items()}
    found = compare_step_times(other, reference)
    assert found is not None and found.verdict is Verdict.FASTER
    assert found.ratio == pytest.approx(0.9, rel=0.002)
    # Round 1 of the reference failed: two pairs are left, which are never enough.
    del reference[1]
    found = compare_step_times(other, reference)
    assert found is not None and (found.num_pairs, found.verdict) == (2, Verdict.OPEN)
    assert compare_step_times(other, {9: 1.0}) is None


def test_the_interval_of_three_runs_is_students() -> None:
    found = against_one(0.80, 0.81, 0.79)
    # ln of the three: mean -0.22325, deviation 0.01250; 4.303 × 0.01250 / √3 = 0.03106 to each side.
    assert found.low == pytest.approx(math.exp(-0.22325 - 0.03106), rel=1e-3)
    assert found.high == pytest.approx(math.exp(-0.22325 + 0.03106), rel=1e-3)


def test_many_pairs_widen_the_interval() -> None:
    ratios = (0.90, 0.92, 0.88)
    one, nine = against_one(*ratios), against_one(*ratios, num_comparisons=9)
    assert (one.verdict, nine.verdict) == (Verdict.FASTER, Verdict.OPEN)
    assert nine.high and one.high and nine.high > one.high


def test_equal_ratios_need_no_resamples() -> None:
    assert against_one(0.5, 0.5, 0.5).high == 0.5
    assert against_one(1.0, 1.0, 1.0).verdict is Verdict.SAME


def test_a_bootstrap_that_reaches_further_than_student_widens_the_interval() -> None:
    found = against_one(*[1.0] * 99, math.e)
    # The logs: mean 0.01, deviation 0.1; Student's ends at 0.01 + 1.984 × 0.1 / √100 = 0.02984. In 97.5 % of resamples
    # the one value is drawn three times at most.
    assert found.high and math.log(found.high) == pytest.approx(0.03, abs=1e-6)


def test_the_interval_is_the_wider_of_scipys_two() -> None:
    draw = random.Random(5)
    for number in (3, 4, 5, 6, 12) * 6:
        logs = [draw.expovariate(5) for _ in range(number)]
        t = stats.t.interval(0.95, number - 1, fmean(logs), stats.sem(logs))
        resampled = stats.bootstrap(
            (logs,), np.mean, n_resamples=NUM_RESAMPLES, method="percentile", rng=0
        ).confidence_interval
        found = against_one(*map(math.exp, logs))
        assert found.low and math.log(found.low) == pytest.approx(min(t[0], resampled.low))
        assert found.high and math.log(found.high) == pytest.approx(max(t[1], resampled.high))


def test_it_says_how_many_repeats_would_tell() -> None:
    assert (
        against_one(0.9).verdict_without_numbers
        == "can't tell from one run each; repeats=3 at least"
    )
    logs = [math.log(ratio) for ratio in (0.90, 1.00, 0.95, 0.97)]
    number = num_needed(logs, 0.05)
    # The mean is -0.0467 and the scatter 0.0442: at 6 runs 2.571 × 0.0442 / √6 = 0.0464 < 0.0467, at 5 0.0549.
    assert number == 6
    assert (
        against_one(0.90, 1.00, 0.95, 0.97).verdict_without_numbers == "can't tell; repeats=6 would"
    )
    wild = against_one(0.2, 5.0, 0.2, 5.0)
    assert wild.needed is None and "not even with repeats=100" in wild.verdict_without_numbers


def test_borders_belong_to_no_difference() -> None:
    assert judge_interval(-MARGIN, MARGIN) is Verdict.SAME
    assert judge_interval(-MARGIN - 1e-9, -1e-9) is Verdict.FASTER
    assert judge_interval(-MARGIN - 1e-9, 0.0) is Verdict.OPEN
    assert judge_interval(1e-9, MARGIN + 1e-9) is Verdict.SLOWER


@pytest.mark.parametrize("num_runs", [3, 5])
def test_of_many_sweeps_without_a_difference_few_claim_one(num_runs: int) -> None:
    """Three points as fast as the reference, each run off by 10 %: a sweep in twenty may claim a difference.

    Of 120 sweeps 6 are expected; 14 or more have a probability of 0.2 %, and the seed is fixed.
    """
    draw = random.Random(7)

    def runs() -> dict[int, float]:
        return {number: math.exp(draw.gauss(0, 0.1)) for number in range(num_runs)}

    wrong = 0
    for _ in range(120):
        reference = runs()
        found = [compare_step_times(runs(), reference, num_comparisons=3) for _ in range(3)]
        wrong += any(c and c.verdict in (Verdict.FASTER, Verdict.SLOWER) for c in found)
    assert wrong < 14


def test_a_real_difference_is_found() -> None:
    draw = random.Random(3)
    found = 0
    for _ in range(40):
        pairs = [math.exp(draw.gauss(math.log(0.8), 0.02)) for _ in range(5)]
        found += against_one(*pairs, num_comparisons=9).verdict is Verdict.FASTER
    assert found == 40
