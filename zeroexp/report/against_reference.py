"""Every point against one reference: which is faster, what else differs, and what cannot be. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroexp.config.keys import ConfigError
from zeroexp.report.measured_points import OUTSIDE, Point
from zeroexp.report.verdict import Comparison, compare_step_times

BELOW = 0.98  # of the least time that is possible: what lies further below is noise
Work = frozenset[tuple[str, str]]  # the settings of a step, whoever computes it: model, data, batch


@dataclass(frozen=True)
class Judged:
    point: Point
    comparison: Comparison | None  # None for the reference, and where a round of both is missing
    impossible: str | None  # why its time is noise


def judge_points(
    points: Sequence[Point], reference: str | None = None
) -> tuple[Point | None, list[Judged]]:
    """Return the reference, by default the first point with a time, and each point judged against it.

    Raises ConfigError if no point has the reference's name.
    """
    timed = [point for point in points if point.seconds_by_round]
    chosen = _named(timed, reference) if reference else next(iter(timed), None)
    if chosen is None:
        return None, []
    number = max(1, len(timed) - 1)
    alone = _fastest_alone(timed)
    return chosen, [
        Judged(
            point,
            None
            if point is chosen
            else compare_step_times(
                point.seconds_by_round, chosen.seconds_by_round, num_comparisons=number
            ),
            why_impossible(point, alone.get(_work(point))),
        )
        for point in timed
    ]


def why_impossible(point: Point, alone: float | None) -> str | None:
    """Say why the point's time is below what N ranks could reach without a byte of communication, or None.

    alone: the step seconds of the fastest point of one rank on the same model and batch; None if there is none.
    The bound is an Nth of it: whatever engine, a step needs that much compute. Caches that a smaller piece fits into
    may beat it by a little.
    """
    ranks, seconds = point.run.world_size, point.step_seconds
    if ranks == 1 or not alone or not seconds:
        return None
    least = alone / ranks
    if seconds >= BELOW * least:
        return None
    return (
        f"{point.name} took {1e3 * seconds:,.1f} ms, less than {ranks} ranks need without any communication "
        f"({1e3 * least:,.1f} ms, from one rank): that is noise"
    )


def _fastest_alone(points: Sequence[Point]) -> dict[Work, float]:
    """Return the least step seconds of one rank, by what it computes."""
    alone = [(_work(point), point.step_seconds) for point in points if point.run.world_size == 1]
    slowest_first = sorted(alone, key=lambda known: -(known[1] or 0.0))
    return {work: seconds for work, seconds in slowest_first if seconds}


def _work(point: Point) -> Work:
    free = (*OUTSIDE, "strategy.", "world_size", "cluster.")
    return frozenset(item for item in point.run.config.items() if not item[0].startswith(free))


def _named(points: Sequence[Point], name: str) -> Point:
    for point in points:
        if name in (point.name, point.run.name):
            return point
    known = ", ".join(point.run.name for point in points)
    raise ConfigError(f"--reference {name}: no such point with a time; use one of {known}")
