"""What a page says first: what ran, and the few numbers that a reader wants before all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from zeroexp.report.columns import Column, all_columns
from zeroexp.report.loss_agreement import losses_of
from zeroexp.report.measured_points import MeasuredPoint, by_sweep
from zeroexp.report.statistics import drift_lines

LEAST = {  # label of a card -> the column whose least number it shows
    "least memory": "total_bytes",
    "shortest step": "step_seconds",
    "least sent": "sent_bytes_per_step",
}
OF_WORK = ("data.global_batch_size", "data.seq_len")
UNITS = {"step_seconds": "ms", "sent_bytes_per_step": "MiB a step"}


class Card(NamedTuple):
    """One number that a reader wants first."""

    label: str
    value: str
    detail: str  # which point it is, and how it compares


def headline_sentences(points: Sequence[MeasuredPoint]) -> list[str]:
    """Say what ran, whether a step is the same work, which runs diverged, and what rose with the steps."""
    diverged = [
        f"{point.name} {summary.verdict}: its numbers are of a run that does not train."
        for point in points
        if (summary := point.pooled.summary) and summary.verdict
    ]
    return [_what_ran(points), *_unlike_work(points), *diverged, *drift_lines(points)]


def _unlike_work(points: Sequence[MeasuredPoint]) -> list[str]:
    """Say where a step of one point trains on more than one of another, so that their seconds and losses differ."""
    sizes = {key: dict.fromkeys(point.run.config[key] for point in points) for key in OF_WORK}
    unlike = [f"{key}={', '.join(values)}" for key, values in sizes.items() if len(values) > 1]
    told = "compare tokens/s, not steps or losses"
    return [f"Steps are not the same work ({'; '.join(unlike)}): {told}."] if unlike else []


def headline_cards(points: Sequence[MeasuredPoint]) -> list[Card]:
    """Return the few numbers that head the page; those that nothing is known of are left out."""
    columns = {column.key: column for column in all_columns(points)}
    cards = [_least(label, columns[key], points) for label, key in LEAST.items()]
    losses = losses_of(points)
    is_one_sweep = len(by_sweep(points)) == 1
    if losses and losses.distance and is_one_sweep:  # others may be meant to train otherwise
        cards.append(Card("losses", *losses.distance))
    return [card for card in cards if card]


def _least(label: str, column: Column, points: Sequence[MeasuredPoint]) -> Card | None:
    """Return the least number, of equal ones the first, beside the largest; None where there are no two."""
    # One rank sends nothing.
    numbers = [(value, point) for point in points if (value := column.value(point))]
    if len(numbers) < 2:
        return None
    (least, low), (most, high) = (end(numbers, key=lambda pair: pair[0]) for end in (min, max))
    share = f", {least / most:.2f} of {high.name}" if most > least else ", like all others"
    why = column.doubt(low)
    doubt = f"; in doubt: {why}" if why else ""
    once = ", measured once" if column.part == "times" and len(low.finished_runs) == 1 else ""
    value = f"{least * column.scale:,.1f} {UNITS.get(column.key, column.unit)}"
    return Card(label, value, f"{low.name}{share}{once}{doubt}")


def _what_ran(points: Sequence[MeasuredPoint]) -> str:
    runs = [run for point in points for run in point.runs]
    models = dict.fromkeys(run.config["model.name"] for run in runs)
    sizes = sorted({run.world_size for run in runs})
    states = Counter(run.status for run in runs if run.status != "done")
    others = ", ".join(f"{number} {status}" for status, number in states.items())
    fewest, *_, most = sorted(len(point.runs) for point in points) * 2
    repeats = f"{fewest} to {most}" if most > fewest else most
    often = f", {repeats} runs each" if most > 1 else ""
    done = f"all came to their end{often}" if not states else f"not all came to their end: {others}"
    return (
        f"{_count(len(points), 'point')} of model {' and '.join(models)} on {_count(sizes[0], 'rank')}"
        f"{''.join(f', {size}' for size in sizes[1:])}; {done}."
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
