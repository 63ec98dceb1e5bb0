"""What heads a page: the numbers that a reader wants first, and what ran, in a few sentences. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from zeroexp.report.columns import MIB
from zeroexp.report.loss_curves import judge_losses, loss_curves
from zeroexp.report.measured_points import Point
from zeroexp.report.statistics import why_unsteady


class Card(NamedTuple):
    """One number that a reader wants first."""

    label: str
    value: str
    detail: str  # which point it is, and how it compares


def headline_sentences(points: Sequence[Point]) -> list[str]:
    """Say what ran, that times are worth no comparison where they scatter, and which runs diverged."""
    timed = sum(point.step_seconds is not None for point in points)
    scattering = timed > 1 and len(_trusted_times(points)) < 2
    diverged = [
        f"{point.name} {point.summary.verdict}: its numbers are of a run that does not train."
        for point in points
        if point.summary and point.summary.verdict
    ]
    nobody = ["No point is called fastest, since times scatter too much."] if scattering else []
    return [_what_ran(points), *nobody, *diverged]


def headline_cards(points: Sequence[Point]) -> list[Card]:
    """Return the few numbers that head the page; those that nothing is known of are left out."""
    done = [(point, point.summary) for point in points if point.summary]
    held = [(summary.memory.total.fullest, point) for point, summary in done]
    # One rank sends nothing.
    sent = [
        (summary.sent_bytes_per_step.fullest, point)
        for point, summary in done
        if summary.sent_bytes_per_step and summary.world_size > 1
    ]
    cards = [
        _least("least memory", held, 1 / MIB, "MiB"),
        _least("shortest step", _trusted_times(points), 1e3, "ms"),
        _least("least sent", sent, 1 / MIB, "MiB a step"),
        _loss_card(points),
    ]
    return [card for card in cards if card]


def _trusted_times(points: Sequence[Point]) -> list[tuple[float, Point]]:
    """Return the step seconds that are worth something."""
    return [(p.step_seconds, p) for p in points if p.step_seconds and not why_unsteady(p)]


def _least(
    label: str, numbers: Sequence[tuple[float, Point]], factor: float, unit: str
) -> Card | None:
    """Return the least number, of equal ones the first, beside the largest; None where there are no two."""
    if len(numbers) < 2 or not any(number for number, _ in numbers):
        return None
    (least, low), (most, high) = (end(numbers, key=lambda pair: pair[0]) for end in (min, max))
    share = f", {least / most:.2f} of {high.name}" if most > least else ", like all others"
    once = ", measured once" if unit == "ms" and len(low.finished_runs) == 1 else ""
    return Card(label, f"{least * factor:,.1f} {unit}", f"{low.name}{share}{once}")


def _loss_card(points: Sequence[Point]) -> Card | None:
    curves = loss_curves(points)
    if len(curves) < 2:
        return None
    worst = judge_losses(curves, bound=math.inf).worst
    if worst.difference == 0:
        return Card("losses", "equal", f"all {len(curves)} curves, to the last bit")
    if math.isinf(worst.difference):
        return Card("losses", "not alike", f"{worst.name} from step {worst.step} on")
    where = f"{worst.name} at step {worst.step}, relative, the most of {len(curves)} curves"
    return Card("losses differ by", f"{worst.difference:.1e}", where)


def _what_ran(points: Sequence[Point]) -> str:
    runs = [run for point in points for run in point.runs]
    models = dict.fromkeys(run.config["model.name"] for run in runs)
    sizes = sorted({run.world_size for run in runs})
    states = Counter(run.status for run in runs if run.status != "done")
    others = ", ".join(f"{number} {status}" for status, number in states.items())
    repeats = max(len(point.runs) for point in points)
    often = f", {repeats} runs each" if repeats > 1 else ""
    done = f"all came to their end{often}" if not states else f"not all came to their end: {others}"
    return (
        f"{_count(len(points), 'point')} of model {' and '.join(models)} on {_count(sizes[0], 'rank')}"
        f"{''.join(f', {size}' for size in sizes[1:])}; {done}."
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
