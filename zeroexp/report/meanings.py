"""What the numbers of a table mean, in sentences below it: each stands there where the table has its column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from zeroexp.config.engines import label_of
from zeroexp.report.columns import Column, peak_flops_by_name
from zeroexp.report.measured_points import Point
from zeroexp.report.statistics import DOUBT, drift_lines, why_doubtful

NOT_AS_ASKED = "dtypes_not_as_asked"  # of measure/dtypes_found.py
# What engine.json holds beside the values of open settings.
TOLD_APART = ("engine", "dtypes", NOT_AS_ASKED)
# Name of a column -> what it is.
MEANINGS = {
    "step": "step, tokens/s: rank 0 over {steps}.",
    "params": "params, grads, optimizer: the most held at any of the moments at rest, after forward, after backward, "
    "after step, on the fullest rank (mean: over ranks, where they differ by more than 2 %).",
    "total": "total: the most of all kinds held at one moment, so it may be less than their sum.",
    "peak": "peak: the most allocated at once during any step, activations included; – where it cannot be known.",
    "planned": "planned: the peak of the rank with most model states, rehearsed (zeroexp plan --rehearse).",
    "predicted": "predicted: the range of its step, by what zeroexp calibrate has measured of this machine.",
    "build": "build: the most allocated at once before the first step.",
    "sent/step": "sent/step: what the rank that sends most handed to others in one step.",
    "by TCP": "by TCP: what of it left through the network; ranks of one host may read each other's memory.",
    "by link": "by link: what all ranks of a node sent over its link, read from the interface less its headers.",
    "host": "host: states that rest there and in no other column; host peak: the most allocated there at once; over "
    "bus: to the host and back in a step (strategy.offload).",
    "files": "files: states in strategy.offload_folder; resident: what of these the kernel kept in memory, in no "
    "total.",
    "MFU": "MFU: the operations that the model needs, as a share of {peaks}.",
}


def meanings_of(points: Sequence[Point], columns: Sequence[Column]) -> list[str]:
    """Return a sentence for each of these columns that needs one, then what is to be known of the points."""
    summaries = [point.summary for point in points if point.summary]
    steps = sorted({(s.num_steps, s.num_warmup_steps) for s in summaries})
    words = {
        "steps": " or ".join(f"{n} steps after {warmup} of warm-up" for n, warmup in steps),
        "peaks": " or ".join(
            f"{peak / 1e12:,.3g} TFLOP/s a rank ({name})"
            for name, peak in peak_flops_by_name(points).items()
        ),
    }
    names = [column.name for column in columns]
    return [
        *(text.format(**words) for name, text in MEANINGS.items() if name in names),
        *_reasons_without_plan(points),
        *([DOUBT] if any(map(why_doubtful, points)) else []),
        *drift_lines(points),
        *_engine_meanings(points),
        *_dtype_meanings(points),
        *_stage_meanings(points),
        *_outer_meanings(points),
    ]


def _reasons_without_plan(points: Sequence[Point]) -> Iterator[str]:
    """Say why some points have no rehearsed peak, once for all of a reason."""
    reasons: dict[str, list[str]] = {}
    for point in points:
        if point.summary and point.summary.not_rehearsed:
            reasons.setdefault(point.summary.not_rehearsed, []).append(point.name)
    for why, who in reasons.items():
        yield f"No peak is planned of {', '.join(who)}: {why}."


def _stage_meanings(points: Sequence[Point]) -> list[str]:
    """Return where an engine does something else than the name of its stage promises."""
    runs = {point.run.label: point.run for point in points}
    notes = [(name, label_of(run.implementation, run.strategy)) for name, run in runs.items()]
    return [f"{name} is {note}." for name, note in notes if note]


def _outer_meanings(points: Sequence[Point]) -> list[str]:
    """Return the loss of seldom synchronised replicas beside a synchronous run's at equal tokens."""
    lines: list[str] = []
    for point in (point for point in points if point.outer_every and point.records):
        run, loss = point.run, point.losses[-1]
        tokens = sum(record.num_tokens for record in point.records)
        words = f"{point.name} is {label_of(run.implementation, run.strategy, point.outer_every)}"
        words += f"; loss {loss:.4f} after {tokens:,} tokens"
        for other in (other for other in points if other.outer_every is None):
            seen = accumulate(record.num_tokens for record in other.records)
            at = dict(zip(seen, other.losses, strict=True)).get(tokens)
            if at is not None:
                words += f", where {other.name} had {at:.4f} ({loss / at - 1:+.1%})"
                break
        lines.append(f"{words}.")
    return lines


def _dtype_meanings(points: Sequence[Point]) -> list[str]:
    """Return what runs computed, kept or sent in another dtype than they were asked to."""
    runs = {point.run.label: point.run for point in points}
    others = {name: run.engine.get(NOT_AS_ASKED) for name, run in runs.items()}
    return [f"dtypes of {name}: {text} asked." for name, text in others.items() if text]


def _engine_meanings(points: Sequence[Point]) -> list[str]:
    """Return the engines' values of open settings, once for all runs with the same values."""
    labels: dict[str, list[str]] = {}
    for run in (point.run for point in points):
        settings = {k: v for k, v in run.engine.items() if v != "null" and k not in TOLD_APART}
        if settings:
            text = ", ".join(f"{key} {value}" for key, value in settings.items())
            labels.setdefault(text, []).append(run.label)
    return [f"{', '.join(dict.fromkeys(who))} ran with {text}." for text, who in labels.items()]
