"""This file tells how well a step time is known: the interval of its median, and whether its spread makes it worthless.

With one run the interval is that of the median over its steps, from order statistics, which knows nothing of what
differs from run to run. With three runs and more it is over runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb

from zeroexp.report.measured_points import Point

LEVEL = 0.95
FEWEST_RUNS = 3
UNSTEADY = 1.25  # slowest over fastest run, or the 95th percentile of steps over their median


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    over: str  # runs | steps


def step_time_interval(point: Point) -> Interval | None:
    """Return the 95 % interval of the point's median step time in seconds; None if too little was measured."""
    seconds = sorted(point.seconds_by_round.values())
    if len(seconds) >= FEWEST_RUNS:
        return _interval_of_mean(tuple(seconds))
    if len(seconds) == 1:
        steps = sorted(r.step_seconds for r in point.records if not r.warmup and not r.traced)
        return _interval_of_median(steps)
    return None


def why_unsteady(point: Point) -> str | None:
    """Say in words why the point's time is worthless, or None."""
    seconds = list(point.seconds_by_round.values())
    if len(seconds) > 1 and max(seconds) > UNSTEADY * min(seconds):
        return (
            f"its {len(seconds)} runs took {1e3 * min(seconds):,.0f} to {1e3 * max(seconds):,.0f} ms a step: "
            "repeat it on a quieter machine"
        )
    summary = point.summary
    if len(seconds) == 1 and summary and summary.step_seconds_p95 > 2 * summary.step_seconds_median:
        ratio = summary.step_seconds_p95 / summary.step_seconds_median
        return (
            f"one step in twenty took {ratio:.1f} times the median: repeat it on a quieter machine"
        )
    return None


@cache
def _interval_of_mean(seconds: tuple[float, ...]) -> Interval:
    from zeroexp.report.verdict import log_interval  # it needs scipy

    low, high = log_interval(seconds, 1 - LEVEL)
    return Interval(low, high, "runs")


def _interval_of_median(ordered: Sequence[float]) -> Interval | None:
    """Return the narrowest pair of order statistics, symmetric in rank, that holds the median with 95 %."""
    number = len(ordered)
    below = 0.0  # probability that fewer than `rank` of the values lie below the median
    best = None
    for rank in range(number // 2):
        below += comb(number, rank) / 2**number
        if 1 - 2 * below < LEVEL:
            break
        best = rank
    return None if best is None else Interval(ordered[best], ordered[number - 1 - best], "steps")
