"""A verdict says whether one point is faster than another, from paired log ratios of their runs' step times. Pure.

Runs of one round ran after one another, so that their ratio is free of what changed slowly between rounds. The mean of
the log ratios gets two intervals, a bootstrap's and Student's, and the verdict uses the wider end of both: a bootstrap
of a few values is too sure of itself, and Student's trusts in a bell curve. Where many pairs are judged at once, each
interval is widened (Bonferroni), so that the chance of any false claim among them stays ALPHA.

Both are scipy's. It is imported where it is needed, since `scipy.stats`, which has the bootstrap, takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, stdev

ALPHA = 0.05
MARGIN = math.log(1.02)  # a smaller difference is none
FEWEST, MOST = 3, 100  # pairs: with fewer nothing is claimed, and more are not asked for
NUM_RESAMPLES = 1999


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
    if len(logs) < FEWEST:
        return Comparison(math.exp(fmean(logs)), None, None, len(logs), Verdict.OPEN, FEWEST)
    alpha = ALPHA / num_comparisons
    low, high = _interval(logs, alpha)
    verdict = judge_interval(low, high)
    needed = num_needed(logs, alpha) if verdict is Verdict.OPEN else None
    return Comparison(
        math.exp(fmean(logs)), math.exp(low), math.exp(high), len(logs), verdict, needed
    )


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


def log_interval(values: Sequence[float], alpha: float) -> tuple[float, float]:
    """Return the interval of the geometric mean of positive values. At least two are needed."""
    low, high = _interval([math.log(value) for value in values], alpha)
    return math.exp(low), math.exp(high)


def _interval(logs: Sequence[float], alpha: float) -> tuple[float, float]:
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

    found = stats.bootstrap(
        (logs,),
        np.mean,
        confidence_level=1 - alpha,
        n_resamples=NUM_RESAMPLES,
        method="percentile",
        rng=0,  # the same runs give the same verdict
    ).confidence_interval
    return float(found.low), float(found.high)
