"""The final table of a sweep: the cost of every point, one row each, aligned for a terminal.

A column without information (master weights of an fp32 run, a mean equal to the fullest rank) is left out. If two
points share strategy, implementation and world size, the settings that differ between them become columns.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from textwrap import wrap

from zeroexp.config.engines import label_of
from zeroexp.report.columns import (
    Column,
    columns_of,
    describe_peak_flops,
    describe_rehearsals,
    shares_memory,
)
from zeroexp.report.measured_points import Point
from zeroexp.report.statistics import DOUBT, drift_lines, why_doubtful
from zeroexp.report.tables import Table

# What a narrow terminal shows, the most important first; rows keep the order of the wide table.
BRIEF = (
    *("status", "step", "total", "peak", "loss", "sent/step", "planned", "tokens/s", "MFU"),
    *("predicted", "params"),
)
WIDTH = 110  # characters in the text below the table
NOT_AS_ASKED = "dtypes_not_as_asked"  # of measure/dtypes_found.py
# What engine.json holds beside the values of open settings.
TOLD_APART = ("engine", "dtypes", NOT_AS_ASKED)


def print_table(points: Sequence[Point]) -> None:
    """Print the table; on a terminal it is fitted to the width, in a pipe it has its full width."""
    print(render(points, _terminal_width()))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines; a terminal gets them wrapped to its width under their own indent, a pipe as they are."""
    width = _terminal_width()
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        print("\n".join(wrap(line, width, subsequent_indent=indent)) if width else line)


def _terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def render(points: Sequence[Point], width: int | None = None) -> str:
    """Return a header of two lines (name, unit), one line per point, and the meaning of each number.

    If that is wider than `width` characters (None: no limit), values that all points share move into a caption. If it
    is still too wide, only those columns of BRIEF are left that fit, and the rest is the page's.
    """

    def fits(columns: Sequence[Column]) -> bool:
        # But for the reasons, which are last in their row.
        return width is None or len(Table.of(points, columns).lines()[2]) <= width

    columns, caption, meanings = columns_of(points), "", _meanings(points)
    if not fits(columns):
        tell_apart = [c for c in columns if c.part == "point" and c.differs(points)]
        shared = [c for c in columns if c.part == "point" and c not in tell_apart]
        same = ", ".join(f"{c.name} {c.text(points[0])}" for c in shared)
        caption = f"all points: {same}\n\n" if same else ""
        columns = [column for column in columns if column not in shared]
    if not fits(columns):
        columns, meanings = _brief_columns(columns, fits), _brief_meanings(points)
    below = wrap(" ".join(meanings), min(width or WIDTH, WIDTH))
    return caption + "\n".join([*Table.of(points, columns).lines(), *below])


def _brief_columns(
    columns: Sequence[Column], fits: Callable[[Sequence[Column]], bool]
) -> list[Column]:
    """Return the columns of a point and those of BRIEF that fit beside them, the first ones first."""
    point = [column for column in columns if column.part == "point"]
    if [column.name for column in point[:2]] == ["strategy", "implementation"]:
        point = [Column("engine", lambda p: p.run.label, "engine"), *point[2:]]
    chosen: list[Column] = []
    for name in BRIEF:
        more = next((column for column in columns if column.name == name), None)
        if more and fits([*point, *chosen, more]):
            chosen.append(more)
    return [*point, *(column for column in columns if column in chosen)]


# ---- what the numbers mean


def _meanings(points: Sequence[Point]) -> list[str]:
    summaries = [point.summary for point in points if point.summary]
    steps = sorted({(s.num_steps, s.num_warmup_steps) for s in summaries})
    counted = " or ".join(f"{n} steps after {warmup} of warm-up" for n, warmup in steps)
    sentences = [
        f"step, tokens/s: rank 0 over {counted}." if steps else "",
        "params, grads, optimizer: the most held at any of the moments at rest, after forward, after backward, after "
        "step, on the fullest rank (mean: over ranks, where they differ by more than 2 %).",
        "total: the most of all kinds held at one moment, so it may be less than their sum.",
        "peak: the most allocated at once during any step, activations included; – where it cannot be known.",
        *describe_rehearsals(points),
        "build: the most allocated at once before the first step."
        if any(s.memory.build_peak for s in summaries)
        else "",
        "sent/step: what the rank that sends most handed to others in one step",
        "(by TCP: what of it left through the network; ranks of one host may read each other's memory)."
        if shares_memory(points)
        else "through the network.",
        "by link: what all ranks of a node sent over its link, read from the interface less its headers."
        if any(s.link_bytes_per_step for s in summaries)
        else "",
        "host: states that rest there and in no other column; host peak: the most allocated there at once; over bus: "
        "to the host and back in a step (strategy.offload)."
        if any(s.memory.host for s in summaries)
        else "",
        "files: states in strategy.offload_folder; resident: what of these the kernel kept in memory, in no total."
        if any(s.memory.files for s in summaries)
        else "",
        describe_peak_flops(points),
        DOUBT if any(map(why_doubtful, points)) else "",
        *drift_lines(points),
        *_engine_meanings(points),
        *_dtype_meanings(points),
        *_stage_meanings(points),
        *_outer_meanings(points),
    ]
    return [sentence for sentence in sentences if sentence]


def _brief_meanings(points: Sequence[Point]) -> list[str]:
    return [
        "step: the median of rank 0. total, peak: the most that the fullest rank held at one moment, and had allocated "
        "at once; planned: its peak in a rehearsal. More columns: a wider terminal, zeroexp report FOLDER --csv -, the "
        "page.",
        *drift_lines(points),
        *_stage_meanings(points),
        *_outer_meanings(points),
    ]


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
