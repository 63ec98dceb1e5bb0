"""Signed errors, and how often "fits" was wrong, as a table; every answer as rows.

On a device with MARGIN less memory than a point took it dies, on one with MARGIN more it trains (benchmarks/promise.py
lets ranks die so). A planner that knows no peak is taken at its model states there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.planners.point import Answer, Point
from benchmarks.table import grid

MARGIN = 0.05
MIB = 1 << 20
SILENT = "can't say"
HEAD = ("planner", "states, %", "peak, %", "fits, and dies", "refused, and trains")
STATES, PEAK = 0, 1


def table(points: Sequence[Point], said: Mapping[str, Sequence[Answer]]) -> str:
    """Return a row for each planner that says something."""
    lines = [[name, *_row(points, answers)] for name, answers in said.items() if _says(answers)]
    return grid(HEAD, lines)


def _says(answers: Sequence[Answer]) -> bool:
    return any(_most(answer) is not None for answer in answers)


def _row(points: Sequence[Point], answers: Sequence[Answer]) -> list[str]:
    errors = [_spread(errors_of(points, answers, which)) for which in (STATES, PEAK)]
    return [*errors, *wrong_verdicts(points, answers)]


def errors_of(points: Sequence[Point], answers: Sequence[Answer], which: int) -> list[float]:
    """Return the signed errors of what is said, as shares of what was measured."""
    pairs = zip(points, answers, strict=True)
    return [
        float(answer[which]) * point.scale / measured - 1
        for point, answer in pairs
        if (measured := _measured(point, which)) and not isinstance(answer[which], str)
    ]


def wrong_verdicts(points: Sequence[Point], answers: Sequence[Answer]) -> tuple[str, str]:
    """Return how often a point fits that dies, and is refused that trains."""
    judged = [
        float(most) * point.scale / point.peak
        for point, answer in zip(points, answers, strict=True)
        if point.peak and (most := _most(answer)) is not None
    ]
    if not judged:
        return SILENT, SILENT
    dies = sum(share <= 1 - MARGIN for share in judged)
    trains = sum(share > 1 + MARGIN for share in judged)
    return str(dies), str(trains)


def _most(answer: Answer) -> float | None:
    numbers = [float(each) for each in answer if not isinstance(each, str)]
    return max(numbers, default=None)


def _measured(point: Point, which: int) -> float | None:
    return point.states if which == STATES else point.peak


def _spread(errors: Sequence[float]) -> str:
    if not errors:
        return SILENT
    middle, least, most = (100 * each for each in (median(errors), min(errors), max(errors)))
    return f"{middle:+.1f} ({least:+.1f}…{most:+.1f}) of {len(errors)}"


def rows(points: Sequence[Point], said: Mapping[str, Sequence[Answer]]) -> list[Sequence[str]]:
    """Return every point and answer in MiB, or why there is none, below the names of the columns."""
    found: list[Sequence[str]] = [("point", "source", "of", "measured, MiB", *said)]
    for index, point in enumerate(points):
        for which, name in ((STATES, "states"), (PEAK, "peak")):
            if (measured := _measured(point, which)) is not None:
                cells = [_cell(answers[index][which], point) for answers in said.values()]
                found.append((point.name, point.source, name, f"{measured / MIB:.3f}", *cells))
    return found


def _cell(said: float | str, point: Point) -> str:
    return f"{SILENT}: {said}" if isinstance(said, str) else f"{said * point.scale / MIB:.3f}"
