"""A report concludes three things beside its tables: verdicts over runs, doubts, and broken claims. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from zeroexp.report.against_reference import Judged, judge_points
from zeroexp.report.differences import lines_of_unequal_facts
from zeroexp.report.exact import lines_of_varied_numbers
from zeroexp.report.measured_points import Point
from zeroexp.report.spread import why_unsteady

ONCE = "Step times are of one run each; repeats=5 would tell which differences are real."

MOST_DOUBTS = 3  # points that each get a line


@dataclass(frozen=True)
class Conclusions:
    reference: Point | None
    judged: list[Judged]
    doubts: list[str]  # times that are worthless or impossible
    broken: list[str]  # exact numbers that vary, and facts that a study wants equal and that differ

    @property
    def verdicts(self) -> list[str]:
        """One line for each point beside the reference; a single line where no point ran twice."""
        compared = [one for one in self.judged if one.comparison]
        if self.reference is None or not compared:
            return []
        if all(one.comparison and one.comparison.num_pairs == 1 for one in compared):
            return [ONCE]
        width = max(len(one.point.name) for one in compared)
        lines = [
            f"  {one.point.name:<{width}}  {one.comparison.verdict_with_numbers}"
            for one in compared
            if one.comparison
        ]
        return [
            f"Step time over that of {self.reference.name}, over runs, 95 % for all together:",
            *lines,
        ]


def conclude(points: Sequence[Point], reference: str | None = None) -> Conclusions:
    """Raises ConfigError if no point has the reference's name."""
    chosen, every = judge_points(points, reference)
    doubts = [*_scattering_times(points), *(one.impossible for one in every if one.impossible)]
    broken = [line for point in points for line in lines_of_varied_numbers(point)]
    broken += [
        f"study.must_equal: {line}"
        for line in lines_of_unequal_facts(points, facts_declared_equal(points))
    ]
    return Conclusions(chosen, every, doubts, broken)


def _scattering_times(points: Sequence[Point]) -> list[str]:
    """Return a line for each point whose time scatters too much; where these are many, one line for all."""
    told = [(point.name, why) for point in points if (why := why_unsteady(point))]
    if len(told) <= MOST_DOUBTS:
        return [f"The time of {name} is worth nothing: {why}." for name, why in told]
    timed = sum(point.step_seconds is not None for point in points)
    who = "all points" if len(told) == timed else f"{len(told)} of {timed} points"
    return [f"The times of {who} are worth nothing. {told[0][0]}: {told[0][1]}."]


def facts_declared_equal(points: Sequence[Point]) -> list[str]:
    """Return what the studies of these points want equal."""
    said = (point.run.config.get("study.must_equal", "[]") for point in points)
    return list(dict.fromkeys(word for words in said for word in json.loads(words)))
