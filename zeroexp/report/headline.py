"""A few sentences that could head a page say what a sweep shows. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zeroexp.report.agreement import judge_losses, largest_distance, numbers_first
from zeroexp.report.columns import MIB
from zeroexp.report.measured_points import Point
from zeroexp.report.spread import why_unsteady


def headline_sentences(points: Sequence[Point]) -> list[str]:
    """Say what ran, who holds least, who is fastest, whether all train alike, and which runs diverged."""
    sentences = [
        _what_ran(points),
        _least_memory(points),
        _fastest(points),
        _loss_agreement(points),
    ]
    return [*filter(None, sentences), *_doubts(points)]


class Card(NamedTuple):
    """One number that a reader wants first."""

    label: str
    value: str
    words: str  # which point it is, and how it compares


def headline_cards(points: Sequence[Point]) -> list[Card]:
    """Return the few numbers that head the page; those that nothing is known of are left out."""
    held = [(p.summary.memory.total.fullest, p) for p in points if p.summary]
    timed = _trusted(points)
    sent = [
        (s.fullest, p)
        for p in points
        if p.summary and p.run.world_size > 1 and (s := p.summary.sent_bytes_per_step)
    ]
    made: list[Card] = []
    if len(held) > 1:
        made.append(_least("least memory", held, 1 / MIB, "MiB"))
    if len(timed) > 1:
        made.append(_least("shortest step", timed, 1e3, "ms"))
    if len(sent) > 1 and max(number for number, _ in sent):
        made.append(_least("least sent", sent, 1 / MIB, "MiB a step"))
    curves = _curves(points)
    if len(curves) > 1:
        made.append(_agreement(curves))
    return made


def _least(label: str, numbers: Sequence[tuple[float, Point]], factor: float, unit: str) -> Card:
    (least, low), (most, high) = (end(numbers, key=lambda pair: pair[0]) for end in (min, max))
    share = f", {least / most:.2f} of {high.name}" if most > least else ", like all others"
    return Card(label, f"{least * factor:,.1f} {unit}", f"{low.name}{share}")


def _agreement(curves: Mapping[str, Sequence[float]]) -> Card:
    worst = max(judge_losses(curves, bound=math.inf).curves, key=lambda curve: curve.difference)
    if worst.difference == 0:
        return Card("losses", "equal", f"all {len(curves)} curves, to the last bit")
    if math.isinf(worst.difference):
        return Card("losses", "not alike", f"{worst.name} from step {worst.step} on")
    return Card(
        "losses differ by",
        f"{worst.difference:.1e}",
        f"{worst.name} at step {worst.step}, relative, the most of {len(curves)} curves",
    )


def _trusted(points: Sequence[Point]) -> list[tuple[float, Point]]:
    """Return the points whose time is worth something, with it."""
    return [(p.step_seconds, p) for p in points if p.step_seconds and not why_unsteady(p)]


def _curves(points: Sequence[Point]) -> dict[str, Sequence[float]]:
    return numbers_first({p.name: [r.loss for r in p.records] for p in points if p.records})


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


def _least_memory(points: Sequence[Point]) -> str:
    held = [(point.summary.memory.total.fullest, point) for point in points if point.summary]
    if len(held) < 2:
        return ""
    (least, low), (most, high) = (end(held, key=lambda pair: pair[0]) for end in (min, max))
    if least == most:
        return f"All points hold {least / MIB:,.1f} MiB on their fullest rank."
    return (
        f"{low.name} holds least: {least / MIB:,.1f} MiB on its fullest rank, {least / most:.2f} of what {high.name} "
        f"holds ({most / MIB:,.1f} MiB)."
    )


def _fastest(points: Sequence[Point]) -> str:
    timed = _trusted(points)
    if len(timed) < 2:
        known = sum(point.step_seconds is not None for point in points)
        return "No point is called fastest, since times scatter too much." if known > 1 else ""
    (least, fast), (most, slow) = (end(timed, key=lambda pair: pair[0]) for end in (min, max))
    once = "" if len(fast.finished_runs) > 1 else ", measured once"
    return (
        f"{fast.name} took the shortest step: {1e3 * least:,.1f} ms, {least / most:.2f} of that of {slow.name} "
        f"({1e3 * most:,.1f} ms){once}."
    )


def _loss_agreement(points: Sequence[Point]) -> str:
    curves = _curves(points)
    return largest_distance(curves) if len(curves) > 1 else ""


def _doubts(points: Sequence[Point]) -> list[str]:
    return [
        f"{point.name} {point.summary.verdict}: its numbers are of a run that does not train."
        for point in points
        if point.summary and point.summary.verdict
    ]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
