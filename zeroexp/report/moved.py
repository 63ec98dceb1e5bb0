"""Two sweeps, before and after a change: which points moved. Pure.

Points are matched by their configuration; a point that only one sweep has is named. Bytes, counts and losses are
compared exactly, step times by the verdict over runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroexp.report.exact import changed_numbers, exact_numbers, first_different_loss
from zeroexp.report.measured_points import OUTSIDE, Point
from zeroexp.report.verdict import Comparison, Verdict, compare_step_times

SHOWN = 3  # exact numbers of one point that are listed; the rest are counted


@dataclass(frozen=True)
class Moved:
    name: str
    comparison: Comparison | None  # the step time after over that before
    exact: list[str]  # exact numbers that changed, in words

    @property
    def has_moved(self) -> bool:
        verdict = self.comparison and self.comparison.verdict
        return bool(self.exact) or verdict in (Verdict.FASTER, Verdict.SLOWER)

    def lines(self) -> list[str]:
        time = self.comparison.verdict_with_numbers if self.comparison else "no time to compare"
        more = [f"and {len(self.exact) - SHOWN} more"] if len(self.exact) > SHOWN else []
        return [f"  {self.name}: step {time}", *(f"    {x}" for x in [*self.exact[:SHOWN], *more])]


def points_that_moved(
    before: Sequence[Point], after: Sequence[Point]
) -> tuple[list[Moved], list[str]]:
    """Return each matched point, and a line for each point that only one sweep has."""
    old = {_key(point): point for point in before}
    new = {_key(point): point for point in after}
    both = [key for key in new if key in old]
    pairs = [_compared(old[key], new[key], len(both)) for key in both]
    alone = [f"  only before: {old[key].name}" for key in old if key not in new]
    alone += [f"  only after: {new[key].name}" for key in new if key not in old]
    return pairs, alone


def describe_moved(pairs: Sequence[Moved], alone: Sequence[str]) -> list[str]:
    """Return the moved points first, then how many did not move, then what has no partner."""
    movers = [one for one in pairs if one.has_moved]
    still = [one for one in pairs if not one.has_moved]
    head = f"{len(movers)} of {len(pairs)} points moved (after over before):"
    number = "1 point has" if len(still) == 1 else f"{len(still)} points have"
    rest = [f"{number} equal bytes, counts and losses; of the step time:"] if still else []
    told = [
        f"  {one.name}: {one.comparison.verdict_with_numbers if one.comparison else 'unknown'}"
        for one in still
    ]
    return [head, *(line for one in movers for line in one.lines()), *rest, *told, *alone]


def _compared(old: Point, new: Point, number: int) -> Moved:
    found = compare_step_times(new.seconds_by_round, old.seconds_by_round, num_comparisons=number)
    exact = [
        f"{name}: {one} before, {two} after"
        for name, one, two in changed_numbers(exact_numbers(old.run), exact_numbers(new.run))
    ]
    curves = [[record.loss for record in point.records] for point in (old, new)]
    step = first_different_loss(*curves)
    if step is not None:
        exact.append(f"losses part at step {step}: {curves[0][step]!r} and {curves[1][step]!r}")
    elif len(curves[0]) != len(curves[1]):
        exact.append(f"{len(curves[0])} steps before, {len(curves[1])} after")
    return Moved(new.name, found, exact)


def _key(point: Point) -> tuple[str, ...]:
    config = point.run.config
    return tuple(f"{key}={value}" for key, value in config.items() if not key.startswith(OUTSIDE))
