"""What a sweep shows, in a few sentences that could head a page. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zeroexp.report.agreement import largest_distance
from zeroexp.report.columns import MIB
from zeroexp.report.points import Point


def headline(points: Sequence[Point]) -> list[str]:
    """Say what ran, who holds least, who is fastest, whether all train alike, and which runs diverged."""
    sentences = [_ran(points), _least_memory(points), _fastest(points), _alike(points)]
    return [*filter(None, sentences), *_doubts(points)]


def _ran(points: Sequence[Point]) -> str:
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
    return (
        f"{low.name} holds least: {least / MIB:,.1f} MiB on its fullest rank, {least / most:.2f} of what {high.name} "
        f"holds ({most / MIB:,.1f} MiB)."
    )


def _fastest(points: Sequence[Point]) -> str:
    timed = [(point.step_seconds, point) for point in points if point.step_seconds]
    if len(timed) < 2:
        return ""
    (least, fast), (most, slow) = (end(timed, key=lambda pair: pair[0]) for end in (min, max))
    once = "" if len(fast.done) > 1 else ", measured once"
    return (
        f"{fast.name} took the shortest step: {1e3 * least:,.1f} ms, {least / most:.2f} of that of {slow.name} "
        f"({1e3 * most:,.1f} ms){once}."
    )


def _alike(points: Sequence[Point]) -> str:
    curves = {point.name: [r.loss for r in point.records] for point in points if point.records}
    return largest_distance(curves) if len(curves) > 1 else ""


def _doubts(points: Sequence[Point]) -> list[str]:
    return [
        f"{point.name} {point.summary.verdict}: its numbers are of a run that does not train."
        for point in points
        if point.summary and point.summary.verdict
    ]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
