"""How well a step time is known, and whether one point is faster than another, or reaches another quality.

Two points are compared over runs, by paired log ratios of their step times: runs of one round ran after one another, so
that their ratio is free of what changed slowly between rounds. The mean of the log ratios gets Student's interval; a
bootstrap of a few values is narrower, and too sure of itself. Where many pairs are judged at once, each interval is
widened (Bonferroni), so that the chance of any false claim among them stays ALPHA.

With one run the interval of a point's own time is that of the median over its steps, from order statistics, which knows
nothing of what differs from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

from zeroexp.measure.drift import STEP_TIME
from zeroexp.report.measured_points import MeasuredPoint
from zeroexp.tracking.run import Run

ALPHA = 0.05
MARGIN = math.log(1.02)  # a smaller difference is none
FEWEST, MOST = 3, 100  # pairs: with fewer nothing is claimed, and more are not asked for
DOUBT = (
    "A time with ? is in doubt: others used more than 10 % of the cores, or runs or steps scatter."
)
# A larger share of the cores that others used, or a wider interval of a time, is a doubt.
SPOILT = 0.10
AGAIN = "again"  # in the environment of a run whose first times were in doubt, in earlier/
UNSTEADY = 1.25  # slowest over fastest run


class TimeVerdict(StrEnum):
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
    verdict: TimeVerdict
    # Repeats that would tell, if runs go on to scatter as they did; None if none would.
    needed: int | None

    @property
    def interval(self) -> str | None:
        return None if self.low is None else f"[{self.low:.2f}, {self.high:.2f}]"

    @property
    def text(self) -> str:
        """`0.71 [0.69, 0.74]: faster`, or `0.95: can't tell; repeats=9 would`."""
        numbers = " ".join(filter(None, (f"{self.ratio:.2f}", self.interval)))
        if self.verdict is not TimeVerdict.OPEN:
            remedy = ""
        elif self.num_pairs < FEWEST:
            rounds = "one round" if self.num_pairs == 1 else f"{self.num_pairs} rounds"
            remedy = f" from {rounds}; repeats={FEWEST} at least"
        elif self.needed:
            remedy = f"; repeats={self.needed} would"
        else:
            remedy = f"; not even with repeats={MOST}"
        return f"{numbers}: {self.verdict}{remedy}"


def aligned(texts: Mapping[str, str]) -> list[str]:
    """Return an indented line for each name."""
    width = max(map(len, texts), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in texts.items()]


@dataclass(frozen=True)
class Interval:
    """The 95 % interval of a point's median step time, in seconds."""

    low: float
    high: float
    over: str  # runs | steps


def compare_step_times(
    seconds: Mapping[Any, float], reference: Mapping[Any, float], *, num_comparisons: int = 1
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
        return Comparison(ratio, None, None, len(logs), TimeVerdict.OPEN, FEWEST)
    alpha = ALPHA / num_comparisons
    low, high = _interval_of_mean(logs, alpha)
    verdict = judge_interval(low, high)
    needed = num_needed(logs, alpha) if verdict is TimeVerdict.OPEN else None
    return Comparison(ratio, math.exp(low), math.exp(high), len(logs), verdict, needed)


def judge_interval(low: float, high: float) -> TimeVerdict:
    """Judge the interval of a mean log ratio; a difference that is surely below MARGIN counts as none."""
    if low >= -MARGIN and high <= MARGIN:
        return TimeVerdict.SAME
    if high < 0:
        return TimeVerdict.FASTER
    return TimeVerdict.SLOWER if low > 0 else TimeVerdict.OPEN


def num_needed(logs: Sequence[float], alpha: float) -> int | None:
    """Return how many pairs would tell, if their mean and scatter stayed as they are; None beyond MOST.

    Student's interval must end before the nearest border: zero, or MARGIN where the mean lies within it.
    """
    mean, scatter = fmean(logs), stdev(logs)
    room = max(abs(mean), MARGIN - abs(mean))
    numbers = range(max(FEWEST, len(logs) + 1), MOST + 1)
    return next((n for n in numbers if _reach_of_student(scatter, n, alpha) < room), None)


@dataclass(frozen=True)
class Quality:
    """What a point reached over its seeds, and how far from the reference, seed by seed."""

    name: str
    metric: str
    num_seeds: int
    mean: float  # not finite where a seed diverged, and then nothing is judged
    deviation: float | None  # of one seed; None for a single one
    low: float | None  # the interval of the difference to the reference, over the reference's mean
    high: float | None

    @property
    def text(self) -> str:
        """`3.2557 ± 0.0123 (4 seeds): equal within 0.4 %`."""
        spread = "" if self.deviation is None else f" ± {self.deviation:.4f}"
        seeds = f"{self.num_seeds} seed{'s' if self.num_seeds > 1 else ''}"
        return ": ".join(filter(None, [f"{self.mean:.4f}{spread} ({seeds})", self.verdict]))

    @property
    def verdict(self) -> str | None:
        if not math.isfinite(self.mean):
            return "diverged"
        if self.low is None or self.high is None:
            return None
        if self.low <= 0 <= self.high:
            return f"equal within {100 * max(abs(self.low), self.high):.2g} %"
        nearest = min(abs(self.low), abs(self.high))
        return f"{'higher' if self.low > 0 else 'lower'} by {100 * nearest:.2g} % at least"


def compare_quality(
    name: str,
    metric: str,
    values: Mapping[int, float],
    reference: Mapping[int, float] | None,
    num_comparisons: int,
) -> Quality:
    """Compare values by seed with those of the reference: equal seeds have the same weights and batches."""
    mean = fmean(values.values())
    whole = fmean(reference.values()) if reference else math.nan
    seeds = sorted(values.keys() & reference.keys()) if reference else []
    deviation = low = high = None
    # Python's stdev raises AttributeError for nan.
    if len(values) > 1 and math.isfinite(mean):
        deviation = stdev(values.values())
    if reference and len(seeds) >= FEWEST and math.isfinite(mean + whole):
        base = abs(whole) or 1.0
        apart = [(values[seed] - reference[seed]) / base for seed in seeds]
        low, high = _interval_of_mean(apart, ALPHA / max(1, num_comparisons))
    return Quality(name, metric, len(values), mean, deviation, low, high)


def step_time_interval(point: MeasuredPoint) -> Interval | None:
    """Return the interval of the point's step time, over runs or over steps; None if too little was measured."""
    seconds = sorted(point.seconds_by_round.values())
    if len(seconds) >= FEWEST:
        low, high = _interval_of_mean([*map(math.log, seconds)], ALPHA)
        return Interval(math.exp(low), math.exp(high), "runs")
    if len(seconds) == 1:
        steps = sorted(r.step_seconds for r in point.records if not r.warmup and not r.traced)
        return _interval_of_median(steps)
    return None


def why_spoilt(run: Run) -> str | None:
    """Say how much of the machine others used, where it was so much that the run's times tell little."""
    cores = float(run.environment.get("machine.num_cpus", math.inf))
    if run.other_cores is None or run.other_cores <= SPOILT * cores:
        return None
    return f"others used {run.other_cores:.1f} of {cores:.0f} cores"


def in_doubt(points: Sequence[MeasuredPoint]) -> Iterator[Run]:
    """Yield the runs that others spoilt, and all runs of points whose time is in doubt for another reason."""
    for point in filter(why_doubtful, points):
        yield from [*filter(why_spoilt, point.finished_runs)] or point.finished_runs


def why_doubtful(point: MeasuredPoint) -> str | None:
    """Say in words why the point's time is in doubt: others spoilt a run of it, or its runs or steps scatter."""
    if spoilt := next(filter(None, map(why_spoilt, point.finished_runs)), None):
        return spoilt
    seconds = sorted(point.seconds_by_round.values())
    if seconds and seconds[-1] > UNSTEADY * seconds[0]:
        low, high = 1e3 * seconds[0], 1e3 * seconds[-1]
        return f"its {len(seconds)} runs took {low:,.0f} to {high:,.0f} ms a step"
    interval = step_time_interval(point)
    if interval and interval.high > interval.low * (1 + SPOILT):
        return f"its 95 % interval is {100 * (interval.high / interval.low - 1):.0f} % wide"
    return None


def drift_lines(points: Sequence[MeasuredPoint]) -> list[str]:
    """Say once for each point what rose with the steps of its runs, but for times that others spoilt."""
    found = {
        f"{point.name}: {what}": how
        for point in points
        for run in point.finished_runs
        for what, how in (run.summary.drift if run.summary else {}).items()
        if what != STEP_TIME or not why_spoilt(run)
    }
    return [f"Drift of {what} {how}." for what, how in found.items()]


def _interval_of_mean(logs: Sequence[float], alpha: float) -> tuple[float, float]:
    """Return Student's interval. At least two values are needed."""
    mean, scatter = fmean(logs), stdev(logs)
    reach = _reach_of_student(scatter, len(logs), alpha)
    return mean - reach, mean + reach


def _reach_of_student(scatter: float, number: int, alpha: float) -> float:
    """Return how far Student's interval of a mean reaches to each side."""
    from scipy.special import stdtrit  # the quantile of Student's distribution

    return float(stdtrit(number - 1, 1 - alpha / 2)) * scatter / math.sqrt(number)


def _interval_of_median(ordered: Sequence[float]) -> Interval | None:
    """Return the narrowest pair of order statistics, symmetric in rank, that holds the median with 95 %."""
    number = len(ordered)
    # The probability that at most so many values lie below the median: number over rank, by 2**number, by logarithms,
    # since of long runs these are numbers of thousands of digits. scipy's takes a third of a second to import.
    whole = math.lgamma(number + 1) - number * math.log(2)
    logs = (whole - math.lgamma(n + 1) - math.lgamma(number - n + 1) for n in range(number // 2))
    below = accumulate(map(math.exp, logs))
    ranks = [rank for rank, probability in enumerate(below) if 2 * probability <= ALPHA]
    return Interval(ordered[ranks[-1]], ordered[number - 1 - ranks[-1]], "steps") if ranks else None
