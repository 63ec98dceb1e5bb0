"""Verdicts over runs and on loss curves, and how often they are wrong where the truth is known."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.report.made import points, timed
from zeroexp.report.loss_agreement import LossVerdict, judge_losses, loss_falls
from zeroexp.report.statistics import (
    MARGIN,
    Comparison,
    Interval,
    TimeVerdict,
    _interval_of_median,
    compare_quality,
    compare_step_times,
    judge_interval,
    step_time_interval,
    why_doubtful,
)

FALLING = [4.0, 3.0, 2.0, 1.0]


def against_one(*ratios: float, num_comparisons: int = 1) -> Comparison:
    """Compare runs that took so many seconds with runs of one second."""
    ones = dict.fromkeys(range(len(ratios)), 1.0)
    found = compare_step_times(dict(enumerate(ratios)), ones, num_comparisons=num_comparisons)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("ratios", "num_comparisons", "verdict", "remedy"),
    [
        ((0.80, 0.81, 0.79), 1, TimeVerdict.FASTER, ""),
        ((1.25, 1.24, 1.27), 1, TimeVerdict.SLOWER, ""),
        ((1.001, 0.999, 1.002), 1, TimeVerdict.SAME, ""),
        (
            (1.010, 1.011, 1.009),
            1,
            TimeVerdict.SAME,
            "",
        ),  # surely slower, and surely by less than 2 %
        ((0.50, 0.50), 1, TimeVerdict.OPEN, " from 2 rounds; repeats=3 at least"),
        ((0.9,), 1, TimeVerdict.OPEN, " from one round; repeats=3 at least"),
        ((0.90, 0.92, 0.88), 1, TimeVerdict.FASTER, ""),
        (
            (0.90, 0.92, 0.88),
            9,
            TimeVerdict.OPEN,
            "; repeats=4 would",
        ),  # many pairs: wider intervals
        # Mean log -0.0467, scatter 0.0442: at 6 runs 2.571 × 0.0442 / √6 = 0.0464 < 0.0467, at 5 0.0549.
        ((0.90, 1.00, 0.95, 0.97), 1, TimeVerdict.OPEN, "; repeats=6 would"),
        ((0.2, 5.0, 0.2, 5.0), 1, TimeVerdict.OPEN, "; not even with repeats=100"),
    ],
)
def test_the_four_verdicts_and_what_would_tell(ratios, num_comparisons, verdict, remedy):
    found = against_one(*ratios, num_comparisons=num_comparisons)
    assert found.verdict is verdict
    assert found.text.partition(": ")[2] == verdict + remedy


def test_borders_belong_to_no_difference() -> None:
    assert judge_interval(-MARGIN, MARGIN) is TimeVerdict.SAME
    assert judge_interval(-MARGIN - 1e-9, -1e-9) is TimeVerdict.FASTER
    assert judge_interval(-MARGIN - 1e-9, 0.0) is TimeVerdict.OPEN
    assert judge_interval(1e-9, MARGIN + 1e-9) is TimeVerdict.SLOWER


def test_runs_of_one_round_are_compared_with_each_other() -> None:
    """The machine slowed down by half from round to round; within a round the ratio is always 0.9."""
    reference = {0: 1.0, 1: 1.5, 2: 2.25}
    other = {number: 0.9 * seconds * (1 + 0.001 * number) for number, seconds in reference.items()}
    found = compare_step_times(other, reference)
    assert found is not None and found.verdict is TimeVerdict.FASTER
    assert found.ratio == pytest.approx(0.9, rel=0.002)
    # Round 1 of the reference failed: two pairs are left, which are never enough.
    del reference[1]
    found = compare_step_times(other, reference)
    assert found is not None and (found.num_pairs, found.verdict) == (2, TimeVerdict.OPEN)
    assert compare_step_times(other, {9: 1.0}) is None


def test_the_interval_is_students() -> None:
    found = against_one(0.80, 0.81, 0.79)
    # ln of the three: mean -0.22325, deviation 0.01250; 4.303 × 0.01250 / √3 = 0.03106 to each side.
    assert found.low == pytest.approx(math.exp(-0.22325 - 0.03106), rel=1e-3)
    assert found.high == pytest.approx(math.exp(-0.22325 + 0.03106), rel=1e-3)
    assert against_one(0.5, 0.5, 0.5).high == 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_seed_that_diverged_is_said_so_and_nothing_else_is_judged(bad: float) -> None:
    whole, diverged = {0: 2.0, 1: 3.0, 2: 4.0}, {0: 2.0, 1: bad, 2: 4.0}
    texts = [
        compare_quality("point", "loss", values, reference, 1).text
        for values, reference in ((diverged, whole), (diverged, None), (whole, diverged))
    ]
    what = f"{bad} (3 seeds): diverged"
    assert texts == [what, what, "3.0000 ± 1.0000 (3 seeds)"]


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
        wrong += any(c and c.verdict in (TimeVerdict.FASTER, TimeVerdict.SLOWER) for c in found)
    assert wrong < 14


def test_the_interval_of_a_median_holds_it_from_both_sides() -> None:
    """Of 11 values the 2nd and 10th hold it with 98.8 %; the 3rd and 9th with 93.5 %, each of them with 96.7 %."""
    assert _interval_of_median(range(11)) == Interval(1, 9, "steps")
    assert _interval_of_median(range(5)) is None
    # Of 20,000 the normal distribution says 10,000 ∓ 1.96 √20,000 / 2. Exact binomials of that size take long seconds.
    began = time.process_time()
    assert _interval_of_median(range(20_000)) == Interval(9860, 10139, "steps")
    assert time.process_time() - began < 1


def test_the_interval_is_over_runs_once_there_are_three(tmp_path) -> None:
    timed(tmp_path / "1", a=0.20)
    timed(tmp_path / "2", a=0.20, b=0.21)
    timed(tmp_path / "3", a=0.20, b=0.21, c=0.22)
    one, two, three = (points(tmp_path / name)[0] for name in "123")
    # 20 steps of 0.35, 0.36 and 0.37 s in turn: the 6th and 15th in order hold the median with 95.9 %.
    steps, runs = step_time_interval(one), step_time_interval(three)
    assert steps and steps.over == "steps"
    assert (steps.low, steps.high) == pytest.approx((0.35, 0.37))
    assert step_time_interval(two) is None
    # Student: the geometric mean of three, 4.303 × their scatter / √3 to each side.
    assert runs and runs.over == "runs"
    assert (runs.low, runs.high) == pytest.approx((0.1864, 0.2362), abs=1e-4)
    assert why_doubtful(three) == "its 95 % interval is 27 % wide"
    timed(tmp_path / "4", a=0.20, b=0.26, c=0.21)
    assert why_doubtful(points(tmp_path / "4")[0]) == "its 3 runs took 200 to 260 ms a step"


# ---- losses


def judged(
    curves: Mapping[str, Sequence[float]], *apart: Sequence[str], **asked: Any
) -> LossVerdict:
    """The verdict of curves that begin with step 0."""
    return judge_losses({name: dict(enumerate(c)) for name, c in curves.items()}, *apart, **asked)


def test_who_goes_on_from_another_run_is_compared_where_both_have_steps() -> None:
    whole = {step: 10.0 - step for step in range(10)}
    late = {step: whole[step] for step in range(6, 10)}
    assert judge_losses({"whole": whole, "late": late}, bound=0.0).off == []
    assert judge_losses({"late": late, "whole": whole}, bound=0.0).off == []
    (_, off) = judge_losses({"whole": whole, "late": late | {8: 3.0}}, bound=0.0).curves
    assert (off.step, off.difference) == (8, 0.5)
    (_, apart) = judge_losses({"whole": whole, "behind": {20: 1.0}}, bound=0.0).curves
    assert apart.difference == math.inf


def test_the_largest_relative_difference_and_its_step_are_found() -> None:
    verdict = judged({"ddp": FALLING, "zero3": [4.0, 3.003, 2.02, 1.0]}, bound=1e-3)
    reference, curve = verdict.curves
    assert (reference.difference, curve.step) == (0.0, 2)
    assert curve.difference == pytest.approx(0.01) and verdict.off
    kept = judged({"ddp": [2.0, 1.0], "zero3": [2.0, 1.25]}, bound=0.25)
    assert kept.off == [] and kept.agreement == (
        "2 loss curves agree: largest relative difference to ddp 2.5e-01 (zero3, step 1), "
        "allowed 2.5e-01"
    )


def test_the_sentences_name_every_curve_that_breaks_a_claim() -> None:
    curves = {"a": [1.0, 1.0], "b": [1.0, 1.5], "c": [1.0, 1.0], "d": [3.0, 1.0]}
    told = judged(curves, bound=0.1).agreement
    assert told and "2.0e+00 (d, step 0), allowed 1.0e-01; off too: b 5.0e-01 (step 1)" in told
    noisy, rising = [4.0, 4.4, 3.0, 3.5, 2.5, 2.9, 2.0, 2.2], [1.0, 1.0, 1.1, 1.2]
    assert (loss_falls(noisy), loss_falls(rising), loss_falls([1.0])) == (True, False, False)
    alone = judged({"a": rising}, bound=1e-6)  # whether it falls is not asked
    assert alone.agreement == "1 loss curve, and no other one to compare it with"
    assert alone.fall is None
    beside = judged({"a": rising, "far": noisy[:4]}, ["far"], bound=1e-6)
    assert beside.agreement == alone.agreement
    verdict = judged({"a": noisy, "b": rising}, bound=None, must_fall=True)
    assert verdict.fall == "1 of 2 losses fall, and not b"


@pytest.mark.parametrize("bad", [[4.0, 3.0, 2.0], [4.0, math.nan, 2.0, 1.0], [math.inf, 3, 2, 1]])
def test_missing_steps_and_numbers_that_are_none_never_agree(bad: list[float]) -> None:
    for curves in ({"a": FALLING, "b": bad}, {"a": bad, "b": FALLING}):
        assert judged(curves, bound=1e9).off
    assert judged({"a": [math.nan], "b": [math.nan]}, bound=1e9).off
