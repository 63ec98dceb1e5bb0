"""Seconds in which at least one of several things happened: what several intervals share counts once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from operator import itemgetter

Interval = tuple[str, float, float]  # name, from, to


class Union:
    """The union of intervals, as parts that lie apart from each other."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for _, start, end in sorted(intervals, key=itemgetter(1)):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        parts = (end - start for start, end in zip(self._starts, self._ends, strict=True))
        self._before = [*accumulate(parts, initial=0.0)]

    def seconds_until(self, when: float) -> float:
        """Return the length of the union before this moment."""
        part = bisect_right(self._starts, when) - 1
        if part < 0:
            return 0.0
        return self._before[part] + min(when, self._ends[part]) - self._starts[part]


def count_once(intervals: Iterable[Interval], but: Iterable[Interval] = ()) -> dict[str, float]:
    """Return name -> seconds, whose sum is the length of the union of all `intervals` outside of those in `but`.

    What several of them share counts under the name of the one that began first.
    """
    left_out, seconds, counted_until = Union(but), dict[str, float](), -inf
    for name, start, end in sorted(intervals, key=itemgetter(1)):
        start = max(start, counted_until)
        if end > start:
            inside = left_out.seconds_until(end) - left_out.seconds_until(start)
            seconds[name] = seconds.get(name, 0.0) + end - start - inside
            counted_until = end
    return seconds


def interval_at(intervals: Sequence[Interval], when: float) -> Interval | None:
    """Return the first interval that holds this moment."""
    return next((each for each in intervals if each[1] <= when < each[2]), None)
