"""What a page says in words: what ran, the numbers that a reader wants first, why runs differ from their tables.

The table of stages knows placements alone (theory.py). Where what a run held or sent differs from it by more than
TOLERANCE, the difference is cut into causes that the run's own files show: imbalance, padding, buffers, activations,
schedule, transport. What is left over is said to be left over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zeroexp.cut.stage import Placement
from zeroexp.measure.record import RunSummary
from zeroexp.report.columns import MIB
from zeroexp.report.measured_points import UNCOUNTED, Point
from zeroexp.report.palette import KIND_NAMES
from zeroexp.report.statistics import largest_distance, loss_curves, why_doubtful
from zeroexp.report.theory import stage_of, table_bytes, table_traffic
from zeroexp.tracking.run import Run

TOLERANCE = 0.02
ROWS = ("parameters", "gradients", "optimizer", "master")


class Card(NamedTuple):
    """One number that a reader wants first."""

    label: str
    value: str
    detail: str  # which point it is, and how it compares


def headline_sentences(points: Sequence[Point]) -> list[str]:
    """Say what ran, and which runs diverged."""
    diverged = [
        f"{point.name} {point.summary.verdict}: its numbers are of a run that does not train."
        for point in points
        if point.summary and point.summary.verdict
    ]
    return [_what_ran(points), *diverged]


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
    curves = loss_curves(points)
    losses = [Card("losses", *largest_distance(curves))] if len(curves) > 1 else []
    return [*filter(None, cards), *losses]


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


# ---- why runs differ from their tables


def explanations(points: Sequence[Point]) -> list[tuple[str, list[str]]]:
    """Return (name, sentences) of each point that has anything to explain."""
    lines = [(point.name, [*_explain_point(point)]) for point in points]
    return [(name, sentences) for name, sentences in lines if sentences]


def _explain_point(point: Point) -> Iterator[str]:
    form, held = table_bytes(point.run), point.held_bytes
    if point.summary is None or form is None:
        return
    for kind in ROWS:
        if _differ(held.get(kind, 0), form[kind]):
            yield _explain_kind(point.run, point.summary, kind, held.get(kind, 0), form[kind])
    if held.get("buffers", 0) > TOLERANCE * sum(held.values()):
        share = held["buffers"] / sum(held.values())
        yield (
            f"Buffers hold {_mib(held['buffers'])} ({100 * share:.0f} %) that no table has: buckets of gradients, "
            "units kept gathered, and memory that ranks share."
        )
    yield from _explain_traffic(point)
    yield from _explain_beside_plan(point.summary)


def _explain_beside_plan(summary: RunSummary) -> Iterator[str]:
    """Say where closed forms, which know all of the above, are wrong."""
    verbs = {"total": "holds", "sent": "sends"}
    for name, error in summary.plan_errors.items():
        planned = summary.plan[name]
        if name in verbs and abs(error) > TOLERANCE * max(planned, 1):
            why = "nothing here explains that"
            if name == "total" and summary.num_warmup_steps < 2:
                why = "memory was read in the first step, before there was an optimizer's state; warm up for two"
            head = f"It {verbs[name]} {_mib(planned + error)} where its closed form says"
            yield f"{head} {_mib(planned)}: {why}."


def _explain_kind(run: Run, summary: RunSummary, kind: str, held: float, form: float) -> str:
    """Say what the fullest rank holds of a kind beside the table, and how much of that is imbalance and padding."""
    ranks = summary.memory.by_kind[kind]
    head = f"{KIND_NAMES[kind].capitalize()}: {_mib(held)} where the table says {_mib(form)}."
    if held == 0:
        why = "This kind was not there at that moment, in the last step whose memory was read."
        return f"{head} {why}"
    causes: list[str] = []
    left = held - form
    skew = ranks.fullest - ranks.mean
    if skew > TOLERANCE * ranks.mean:
        causes.append(
            f"the fullest rank holds {_mib(skew)} more than the mean, since pieces are uneven"
        )
        left -= skew
    placement = getattr(stage_of(run), "optimizer" if kind == "master" else kind)
    padding = ranks.mean - form
    if placement is Placement.SHARD and padding > 0 and abs(left) > TOLERANCE * form:
        causes.append(f"padding and what every rank holds whole take {_mib(padding)} on each rank")
        left -= padding
    if abs(left) > TOLERANCE * max(form, 1):
        causes.append(f"{_mib(abs(left))} {'more' if left > 0 else 'less'} than these explain")
    reasons = "; ".join(causes)
    return f"{head} {reasons[:1].upper()}{reasons[1:]}."


def _explain_traffic(point: Point) -> Iterator[str]:
    run, form, sent = point.run, table_traffic(point.run), point.sent_bytes
    if form is None or run.world_size == 1 or not sent:
        return
    measured, expected = sum(sent.values()), sum(form.values())
    if not _differ(measured, expected):
        return
    head = f"It sends {_mib(measured)} a step where the table says {_mib(expected)}. "
    if UNCOUNTED in sent:
        yield head + (
            "Its engine sends from C++ through the backend: gloo's reduce-scatter is an all-reduce inside, of twice "
            "the bytes."
        )
        return
    more = {kind: sent.get(kind, 0) - form.get(kind, 0) for kind in [*form, *sent]}
    parts = [
        f"{kind} {_mib(number, sign=True)}"
        for kind, number in more.items()
        if abs(number) > TOLERANCE * expected
    ]
    keep = run.config.get("strategy.keep")
    why = f" strategy.keep={keep} leaves units gathered from forward to backward."
    kept = keep in ("last", "all") and more.get("gather", 0) < 0
    yield f"{head}By kind: {', '.join(parts) or 'each a little'}.{why if kept else ''}"


def _differ(measured: float, form: float) -> bool:
    return abs(measured - form) > TOLERANCE * max(form, 1)


def _mib(number: float, *, sign: bool = False) -> str:
    return f"{number / MIB:{'+' if sign else ''},.1f} MiB"
