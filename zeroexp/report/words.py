"""What a page says first: what ran, and the few numbers that a reader wants before all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from zeroexp.report.columns import MIB
from zeroexp.report.measured_points import Point
from zeroexp.report.statistics import drift_lines, losses_of, why_doubtful


class Card(NamedTuple):
    """One number that a reader wants first."""

    label: str
    value: str
    detail: str  # which point it is, and how it compares


def headline_sentences(points: Sequence[Point]) -> list[str]:
    """Say what ran, which runs diverged, and what rose with the steps."""
    diverged = [
        f"{point.name} {point.summary.verdict}: its numbers are of a run that does not train."
        for point in points
        if point.summary and point.summary.verdict
    ]
    return [_what_ran(points), *diverged, *drift_lines(points)]


def headline_cards(points: Sequence[Point]) -> list[Card]:
    """Return the few numbers that head the page; those that nothing is known of are left out."""
    done = [(point, point.summary) for point in points if point.summary]
    times = [(point.step_seconds, point) for point in points if point.step_seconds]
    held = [(summary.memory.total.fullest, point) for point, summary in done]
    # One rank sends nothing.
    sent = [
        (summary.sent_bytes_per_step.fullest, point)
        for point, summary in done
        if summary.sent_bytes_per_step and summary.world_size > 1
    ]
    cards = [
        _least("least memory", held, 1 / MIB, "MiB"),
        _least("shortest step", times, 1e3, "ms"),
        _least("least sent", sent, 1 / MIB, "MiB a step"),
    ]
    losses = losses_of(points)
    if losses and losses.distance:
        cards.append(Card("losses", *losses.distance))
    return [card for card in cards if card]


def _least(
    label: str, numbers: Sequence[tuple[float, Point]], factor: float, unit: str
) -> Card | None:
    """Return the least number, of equal ones the first, beside the largest; None where there are no two."""
    if len(numbers) < 2 or not any(number for number, _ in numbers):
        return None
    (least, low), (most, high) = (end(numbers, key=lambda pair: pair[0]) for end in (min, max))
    share = f", {least / most:.2f} of {high.name}" if most > least else ", like all others"
    why = why_doubtful(low) if unit == "ms" else None
    doubt = f"; in doubt: {why}" if why else ""
    once = ", measured once" if unit == "ms" and len(low.finished_runs) == 1 else ""
    return Card(label, f"{least * factor:,.1f} {unit}", f"{low.name}{share}{once}{doubt}")


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
