"""What rises with the steps of a run: the time of a step, memory between steps, garbage collection, live objects.

The measured steps are cut into equal windows, and each gives the mean of the middle half of its readings, which no
single slow step moves. Kendall's S is the number of pairs of windows of which the later one is higher, less those of
which it is lower. Where nothing drifts every order of the windows is equally likely, whatever their noise looks like,
so that the chance of so large an S is a count of permutations. A rise is named where that chance is at most CHANCE and
where the slope of Theil and Sen, which is the median over the same pairs, comes to something.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations, pairwise
from math import factorial
from statistics import fmean, median

from zeroexp.measure.record import StepRecord

READ_EVERY = 10  # steps, of which one is read, and the least of a window
MOST_WINDOWS = 30  # of 300 steps and more
CHANCE = 1e-4  # of an alarm about one thing in a run where nothing drifts; 8 windows are the fewest that can tell
LEAST_RISE = 0.015  # over the run, as a share: half of what 1 % per 100 steps come to in 300
LEAST_OBJECTS = 5.0  # a step
STEP_TIME = "step time"
OBJECTS = "live objects"
# name -> field of StepRecord, the field whose median its rise is a share of, and how that is said
WATCHED = {
    STEP_TIME: ("step_seconds", "step_seconds", "rises by {:.2g} % per 100 steps"),
    "memory between steps": ("resting_bytes", "resting_bytes", "rises by {:.2g} % per 100 steps"),
    "garbage collection": (
        "collection_seconds",
        "step_seconds",
        "takes {:.2g} % of a step more in 100 steps",
    ),
}


def read_between_steps(record: StepRecord, held_bytes: Callable[[], int | None]) -> None:
    """Read what rests before every tenth step, outside of its clock.

    What waits for the garbage collector is no leak, nor are Python's lists of freed objects, which only a full
    collection empties and which else grow for hundreds of steps.
    """
    if (record.step + 1) % READ_EVERY == 0:
        record.resting_bytes = held_bytes()
        began = time.perf_counter()
        gc.collect()
        record.collection_seconds = time.perf_counter() - began
        record.num_objects = sys.getallocatedblocks()


def rising(records: Iterable[StepRecord]) -> dict[str, str]:
    """Return what rises over the measured steps of these, and by how much."""
    steps = [record for record in records if not (record.warmup or record.traced)]
    num = min(MOST_WINDOWS, len(steps) // READ_EVERY)
    ends = [len(steps) * index // max(1, num) for index in range(num + 1)]
    windows = [steps[start:end] for start, end in pairwise(ends)]
    found: dict[str, str] = {}
    for name, (key, whole, text) in WATCHED.items():
        if slope := slope_of_rise(_middles(windows, key)):
            share = slope / median(value for _, value in _middles(windows, whole))
            if share * len(steps) >= LEAST_RISE:
                found[name] = text.format(1e4 * share)
    if (slope := slope_of_rise(_middles(windows, "num_objects"))) >= LEAST_OBJECTS:
        found[OBJECTS] = f"rise by {slope:.0f} a step"
    return found


def slope_of_rise(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of Theil and Sen, or 0 where these points may well be in a random order."""
    pairs = [(x2 - x1, y2 - y1) for (x1, y1), (x2, y2) in combinations(points, 2)]
    score = sum((rise > 0) - (rise < 0) for _, rise in pairs)
    if chance_of(score, len(points)) > CHANCE:
        return 0.0
    return median(rise / steps for steps, rise in pairs)


def chance_of(score: int, num_values: int) -> float:
    """Return the chance that Kendall's S of so many values in random order is at least `score`."""
    lower = (num_values * (num_values - 1) // 2 - score) // 2
    return sum(_orders(num_values)[: lower + 1]) / factorial(num_values)


@cache
def _orders(num_values: int) -> list[int]:
    """Return how many orders of so many values there are, by the number of pairs of which the later one is lower."""
    if num_values < 2:
        return [1]
    less = _orders(num_values - 1)  # the largest comes before 0 to num_values - 1 of the others
    most = len(less) + num_values - 1
    return [sum(less[max(0, lower - num_values + 1) : lower + 1]) for lower in range(most)]


def _middles(windows: Sequence[Sequence[StepRecord]], key: str) -> list[tuple[float, float]]:
    """Return (step, mean of the middle half of this field's readings) of each window that has any."""
    points: list[tuple[float, float]] = []
    for window in windows:
        read = [record for record in window if getattr(record, key) is not None]
        if read:
            values = sorted(float(getattr(record, key)) for record in read)
            cut = len(values) // 4
            middle = fmean(values[cut : len(values) - cut])
            points.append((fmean(record.step for record in read), middle))
    return points
