"""How well a step time is known, and whether one point is faster than another. Pure.

Two points are compared over runs, by paired log ratios of their step times: runs of one round ran after one another, so
that their ratio is free of what changed slowly between rounds. The mean of the log ratios gets two intervals, a
bootstrap's and Student's, and the wider end of both counts: a bootstrap of a few values is too sure of itself, and
Student's trusts in a bell curve. Where many pairs are judged at once, each interval is widened (Bonferroni), so that
the chance of any false claim among them stays ALPHA.

With one run the interval of a point's own time is that of the median over its steps, from order statistics, which knows
nothing of what differs from run to run.

Both intervals are scipy's. It is imported where it is needed, since `scipy.stats`, which has the bootstrap, takes a
second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from statistics import fmean, stdev

from zeroexp.measure.record import RunSummary
from zeroexp.report.measured_points import Point

ALPHA = 0.05
MARGIN = math.log(1.02)  # a smaller difference is none
FEWEST, MOST = 3, 100  # pairs: with fewer nothing is claimed, and more are not asked for
NUM_RESAMPLES = 1999
UNSTEADY = 1.25  # slowest over fastest run
UNSTEADY_STEPS = 2.0  # the 95th percentile of the steps of one run over their median


class Verdict(Enum):
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "no difference within ±2 %"
    OPEN = "can't tell"


@dataclass(frozen=True)
class Comparison:
    """The step time of a point over that of its reference."""

    ratio: float  # geometric mean over pairs
    low: float | None  # the interval of the ratio; None with fewer than FEWEST pairs
    high: float | None
    num_pairs: int
    verdict: Verdict
    # Repeats that would tell, if runs go on to scatter as they did; None if none would.
    needed: int | None

    @property
    def verdict_with_numbers(self) -> str:
        """The verdict with its numbers: `0.71 [0.69, 0.74]: faster`."""
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.ratio:.2f}{interval}: {self.verdict_without_numbers}"

    @property
    def verdict_without_numbers(self) -> str:
        """The verdict without numbers: `can't tell; repeats=9 would`."""
        return f"{self.verdict.value}{self._remedy}"

    @property
    def _remedy(self) -> str:
        if self.verdict is not Verdict.OPEN:
            return ""
        if self.num_pairs < FEWEST:
            runs = "one run" if self.num_pairs == 1 else f"{self.num_pairs} runs"
            return f" from {runs} each; repeats={FEWEST} at least"
        return (
            f"; repeats={self.needed} would" if self.needed else f"; not even with repeats={MOST}"
        )


@dataclass(frozen=True)
class Interval:
    """The 95 % interval of a point's median step time, in seconds."""

    low: float
    high: float
    over: str  # runs | steps


def compare_step_times(
    seconds: Mapping[int, float], reference: Mapping[int, float], *, num_comparisons: int = 1
) -> Comparison | None:
    """Compare step seconds by round with those of the reference; None if no round has both.

    num_comparisons: how many pairs of points are judged beside one another.
    """
    rounds = sorted(seconds.keys() & reference.keys())
    if not rounds:
        return None
    logs = [math.log(seconds[number] / reference[number]) for number in rounds]
    ratio = math.exp(fmean(logs))
    if len(logs) < FEWEST:
        return Comparison(ratio, None, None, len(logs), Verdict.OPEN, FEWEST)
    alpha = ALPHA / num_comparisons
    low, high = _interval_of_mean(tuple(logs), alpha)
    verdict = judge_interval(low, high)
    needed = num_needed(logs, alpha) if verdict is Verdict.OPEN else None
    return Comparison(ratio, math.exp(low), math.exp(high), len(logs), verdict, needed)


def judge_interval(low: float, high: float) -> Verdict:
    """Judge the interval of a mean log ratio; a difference that is surely below MARGIN counts as none."""
    if low >= -MARGIN and high <= MARGIN:
        return Verdict.SAME
    if high < 0:
        return Verdict.FASTER
    return Verdict.SLOWER if low > 0 else Verdict.OPEN


def num_needed(logs: Sequence[float], alpha: float) -> int | None:
    """Return how many pairs would tell, if their mean and scatter stayed as they are; None beyond MOST.

    Student's interval must end before the nearest border: zero, or MARGIN where the mean lies within it.
    """
    mean, scatter = fmean(logs), stdev(logs)
    room = max(abs(mean), MARGIN - abs(mean))
    numbers = range(max(FEWEST, len(logs) + 1), MOST + 1)
    return next((n for n in numbers if _reach_of_student(scatter, n, alpha) < room), None)


def step_time_interval(point: Point) -> Interval | None:
    """Return the interval of the point's step time, over runs or over steps; None if too little was measured."""
    seconds = sorted(point.seconds_by_round.values())
    if len(seconds) >= FEWEST:
        low, high = _interval_of_mean(tuple(map(math.log, seconds)), ALPHA)
        return Interval(math.exp(low), math.exp(high), "runs")
    if len(seconds) == 1:
        steps = sorted(r.step_seconds for r in point.records if not r.warmup and not r.traced)
        return _interval_of_median(steps)
    return None


def why_unsteady(point: Point) -> str | None:
    """Say in words why the point's time is worthless, or None."""
    seconds, summary = list(point.seconds_by_round.values()), point.summary
    if len(seconds) > 1 and max(seconds) > UNSTEADY * min(seconds):
        low, high = 1e3 * min(seconds), 1e3 * max(seconds)
        why = f"its {len(seconds)} runs took {low:,.0f} to {high:,.0f} ms a step"
    elif len(seconds) == 1 and summary and _p95_ratio(summary) > UNSTEADY_STEPS:
        why = f"one step in twenty took {_p95_ratio(summary):.1f} times the median"
    else:
        return None
    return f"{why}: repeat it on a quieter machine"


def _p95_ratio(summary: RunSummary) -> float:
    return summary.step_seconds_p95 / summary.step_seconds_median


@cache
def _interval_of_mean(logs: tuple[float, ...], alpha: float) -> tuple[float, float]:
    """Return the wider of Student's interval and the bootstrap's. At least two values are needed."""
    mean, scatter = fmean(logs), stdev(logs)
    if scatter == 0:
        return mean, mean
    reach = _reach_of_student(scatter, len(logs), alpha)
    low, high = mean - reach, mean + reach
    if low <= min(logs) and max(logs) <= high:
        return low, high  # no mean of resamples lies outside of the values, so none widens this
    lowest, highest = _bootstrap(logs, alpha)
    return min(low, lowest), max(high, highest)


def _reach_of_student(scatter: float, number: int, alpha: float) -> float:
    """Return how far Student's interval of a mean reaches to each side."""
    from scipy.special import stdtrit  # the quantile of Student's distribution

    return float(stdtrit(number - 1, 1 - alpha / 2)) * scatter / math.sqrt(number)


def _bootstrap(logs: Sequence[float], alpha: float) -> tuple[float, float]:
    import numpy as np
    from scipy import stats

    interval = stats.bootstrap(
        (logs,),
        np.mean,
        confidence_level=1 - alpha,
        n_resamples=NUM_RESAMPLES,
        method="percentile",
        rng=0,  # the same runs give the same verdict
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _interval_of_median(ordered: Sequence[float]) -> Interval | None:
    """Return the narrowest pair of order statistics, symmetric in rank, that holds the median with 95 %."""
    number = len(ordered)
    below = 0.0  # probability that fewer than `rank` of the values lie below the median
    best = None
    for rank in range(number // 2):
        below += math.comb(number, rank) / 2**number
        if 2 * below > ALPHA:
            break
        best = rank
    return None if best is None else Interval(ordered[best], ordered[number - 1 - best], "steps")
