"""What the numbers of a table mean, in sentences below it: each stands there where the table has its column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from zeroexp.config.engines import label_of
from zeroexp.report.columns import Column, peaks_of
from zeroexp.report.measured_points import MeasuredPoint
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
    "peak": "peak: the most allocated at once during any step since the last start, activations included; – where it "
    "cannot be known.",
    "planned": "planned: the peak of the rank with most model states, rehearsed (zeroexp plan --rehearse).",
    "predicted": "predicted: the range of its step, by what zeroexp calibrate has measured of this machine.",
    "build": "build: the most allocated at once before the first step.",
    "sent/step": "sent/step: what the rank that sends most handed to others in one step; over TCP with gloo's headers.",
    "by TCP": "by TCP: what of it left through the network; ranks of one host may read each other's memory.",
    "by link": "by link: what all ranks of a node sent over its link, read from the interface less its headers.",
    "host": "host: states that rest there and in no other column; host peak: the most allocated there at once; over "
    "bus: to the host and back in a step (strategy.offload).",
    "files": "files: states in strategy.offload_folder; resident: what of these the kernel kept in memory, in no "
    "total.",
    "MFU": "MFU: the operations that the model needs, as a share of {peaks}.",
}


def meanings_of(points: Sequence[MeasuredPoint], columns: Sequence[Column]) -> list[str]:
    """Return a sentence for each of these columns that needs one, then what is to be known of the points."""
    summaries = [point.summary for point in points if point.summary]
    steps = sorted({(s.num_steps, s.num_warmup_steps) for s in summaries})
    words = {
        "steps": " or ".join(f"{n} steps after {warmup} of warm-up" for n, warmup in steps),
        "peaks": " or ".join(
            f"{peak.per_second / 1e12:,.3g} TFLOP/s a rank ({peak.name})"
            for peak in dict.fromkeys(peaks_of(points).values())
        ),
    }
    names = [column.name for column in columns]
    return [
        *(text.format(**words) for name, text in MEANINGS.items() if name in names),
        *_said_once(points, _why_no_plan, "No peak is planned of {who}: {what}."),
        *([DOUBT] if any(map(why_doubtful, points)) else []),
        *drift_lines(points),
        *_said_once(points, _settled, "{who} ran with {what}."),
        *_said_once(points, _other_dtypes, "dtypes of {who}: {what} asked."),
        *_stage_meanings(points),
    ]


def _said_once(
    points: Sequence[MeasuredPoint],
    text_of: Callable[[MeasuredPoint], tuple[str, str | None]],
    form: str,
) -> list[str]:
    """Return a sentence for each text, once for all that it is said of: points, where several texts have one name."""
    names: dict[str, dict[str, None]] = {}
    said = [(point, *text_of(point)) for point in points]
    texts = {(who, text) for _, who, text in said}
    times = Counter(who for who, _ in texts)
    for point, who, text in said:
        if text:
            names.setdefault(text, {})[who if times[who] == 1 else point.name] = None
    return [form.format(who=", ".join(who), what=text) for text, who in names.items()]


def _why_no_plan(point: MeasuredPoint) -> tuple[str, str | None]:
    return point.name, point.summary and point.summary.not_rehearsed


def _settled(point: MeasuredPoint) -> tuple[str, str]:
    """The engine's values of open settings."""
    values = {k: v for k, v in point.run.engine.items() if v != "null" and k not in TOLD_APART}
    return point.run.label, ", ".join(f"{key} {value}" for key, value in values.items())


def _other_dtypes(point: MeasuredPoint) -> tuple[str, str | None]:
    """What the run computed, kept or sent in another dtype than it was asked to."""
    return point.run.label, point.run.engine.get(NOT_AS_ASKED)


def _stage_meanings(points: Sequence[MeasuredPoint]) -> list[str]:
    """Return where an engine does something else than the name of its stage promises."""
    notes = {
        point.name if point.outer_every else point.run.label: label_of(
            point.run.implementation, point.run.strategy, point.outer_every
        )
        for point in points
    }
    return [f"{name} is {note}." for name, note in notes.items() if note]
