"""The final table of a sweep: the cost of every point, one row each, aligned for a terminal.

A column without information (master weights of an fp32 run, a mean equal to the fullest rank) is left out. If two
points share strategy, implementation and world size, the settings that differ between them become columns.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from textwrap import wrap

from zeroexp.report.columns import (
    STATUS,
    Column,
    describe_peak_flops,
    loss_columns,
    memory_columns,
    plan_column,
    point_columns,
    shares_memory,
    time_columns,
    traffic_columns,
)
from zeroexp.tracking.run import Run

ENGINE = ("strategy", "implementation")
# What a narrow terminal shows, the most important first; rows keep the order of the wide table.
BRIEF = (
    "status",
    "step",
    "total",
    "peak",
    "loss",
    "sent/step",
    "tokens/s",
    "MFU",
    "planned",
    "params",
)
WIDTH = 110  # characters in the text below the table

# These notes explain where torch's engines differ from what the stage's name promises.
NOTES = {
    "zero1/torch": "zero1/torch is DDP + ZeroRedundancyOptimizer: gradients rest replicated, 3P of traffic.",
    "zero2/torch": "zero2/torch is FSDP2 without reshard: parameters rest sharded.",
}


def print_table(runs: Sequence[Run]) -> None:
    """Print the table; on a terminal it is fitted to the width, in a pipe it has its full width."""
    print(render(runs, _terminal_width()))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines; a terminal gets them wrapped to its width under their own indent, a pipe as they are."""
    width = _terminal_width()
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        print("\n".join(wrap(line, width, subsequent_indent=indent)) if width else line)


def _terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def render(runs: Sequence[Run], width: int | None = None) -> str:
    """Return a header of two lines (name, unit), one line per run, and the meaning of each number.

    If that is wider than `width` characters (None: no limit), values that all points share move into a caption. If it
    is still too wide, it becomes two tables, time and traffic before memory. Where these do not fit either, only the
    columns of BRIEF are left that fit, and the rest is the page's.
    """
    point, traffic = point_columns(runs), traffic_columns(runs)
    memory = [*memory_columns(runs), plan_column(runs)]
    losses, times = loss_columns(runs), time_columns(runs)
    wide = [*point, *losses, *times, *_flat(memory), *_flat(traffic), STATUS]
    if width is None or _width(runs, wide) <= width:
        return "\n".join([*_lines(runs, wide), *_footnotes(runs, WIDTH)])
    shared = [column for column in point if len({column.value(run) for run in runs}) == 1]
    point = [column for column in point if column not in shared]
    parts = [losses, times[:2], times[2:], *traffic]
    one = [*point, *losses, *times, *_flat(memory), *_flat(traffic), STATUS]
    two = [*point, *_flat(parts), STATUS], [*point, *_flat(memory)]
    caption = ["\n".join(_caption(shared, runs, width))] if shared else []
    tables = next((t for t in ([one], two) if _fit(runs, t, width)), None)
    foot = _footnotes if tables else _brief_foot
    tables = tables or [
        _brief_table(runs, point, [column for column in one if column not in point], width)
    ]
    texts = ["\n".join(_lines(runs, columns)) for columns in tables]
    return "\n".join(["\n\n".join([*caption, *texts]), *foot(runs, width)])


def _brief_table(
    runs: Sequence[Run], point: Sequence[Column], others: Sequence[Column], width: int
) -> list[Column]:
    """Return the columns of a point and those of BRIEF that fit beside them, the first ones first."""
    engine = [column for column in point if column.name in ENGINE]
    head = [*_joined(engine), *(column for column in point if column not in engine)]
    chosen: list[Column] = []
    for name in BRIEF:
        more = next((c for c in others if c.name == name and c not in chosen), None)
        if more and _width(runs, [*head, *chosen, more]) <= width:
            chosen.append(more)
    return [*head, *(column for column in others if column in chosen)]


def _joined(columns: Sequence[Column]) -> list[Column]:
    """Return one column in place of several, with their values side by side."""
    if len(columns) < 2:
        return [*columns]
    return [Column("engine", "", lambda run: "/".join(c.value(run) for c in columns), left=True)]


def _caption(shared: Sequence[Column], runs: Sequence[Run], width: int) -> list[str]:
    words = [f"{column.name} {column.value(runs[0])}" for column in shared]
    return wrap(f"all points: {', '.join(words)}", min(width, WIDTH))


def _flat(parts: Sequence[Sequence[Column]]) -> list[Column]:
    return [column for part in parts for column in part]


def _fit(runs: Sequence[Run], tables: Sequence[Sequence[Column]], width: int) -> bool:
    return all(_width(runs, columns) <= width for columns in tables)


def _width(runs: Sequence[Run], columns: Sequence[Column]) -> int:
    """Return the table's width without the reasons, which are last in their row."""
    return len(_lines(runs, columns)[2])


def _lines(runs: Sequence[Run], columns: Sequence[Column]) -> list[str]:
    header = [[c.name for c in columns], [c.unit for c in columns]]
    rows = [[c.value(run) for c in columns] for run in runs]
    widths = [max(map(len, column)) for column in zip(*header, *rows, strict=True)]
    lines = [_aligned(cells, widths, columns) for cells in header + rows]
    rule = "-" * max(map(len, lines[:2]))
    return [*lines[:2], rule, *lines[2:], rule]


def _aligned(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    padded = [
        cell.ljust(width) if column.left else cell.rjust(width)
        for cell, width, column in zip(cells, widths, columns, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _footnotes(runs: Sequence[Run], width: int) -> list[str]:
    summaries = [run.summary for run in runs if run.summary]
    steps = sorted({(s.num_steps, s.num_warmup_steps) for s in summaries})
    counted = " or ".join(f"{n} steps after {warmup} of warm-up" for n, warmup in steps)
    sentences = [
        f"step, tokens/s: rank 0 over {counted}." if steps else "",
        "params, grads, optimizer: the most held at any of the moments at rest, after forward, after backward, after "
        "step, on the fullest rank (mean: over ranks, where they differ by more than 2 %).",
        "total: the most of all kinds held at one moment, so it may be less than their sum.",
        "peak: the most allocated at once during any step, activations included; – where it cannot be known.",
        "planned: the total that closed forms say of the same run (python -m zeroexp.plan)."
        if plan_column(runs)
        else "",
        "build: the most allocated at once before the first step."
        if any(s.memory.build_peak for s in summaries)
        else "",
        "sent/step: what the rank that sends most handed to others in one step",
        "(by TCP: what of it left through the network; ranks of one host may read each other's memory)."
        if shares_memory(runs)
        else "through the network.",
        describe_peak_flops(runs),
        *_private_notes(runs),
        *_engine_notes(runs),
        *[NOTES[label] for label in dict.fromkeys(r.label for r in runs) if label in NOTES],
    ]
    return wrap(" ".join(filter(None, sentences)), min(width, WIDTH))


def _brief_foot(runs: Sequence[Run], width: int) -> list[str]:
    sentences = [
        "step: the median of rank 0. total, peak: the most that the fullest rank held at one moment, and had allocated "
        "at once. More columns: a wider terminal, python -m zeroexp.report FOLDER --csv -, the page.",
        *[NOTES[label] for label in dict.fromkeys(r.label for r in runs) if label in NOTES],
    ]
    return wrap(" ".join(sentences), min(width, WIDTH))


def _private_notes(runs: Sequence[Run]) -> list[str]:
    """Return notes on memory beyond the pools, which a model needs whose modules run inside one another."""
    counts = {run.label: run.summary.num_private_units for run in runs if run.summary}
    return [
        f"{label}: {count} units ran while their pool was in use and got memory of their own."
        for label, count in counts.items()
        if count
    ]


def _engine_notes(runs: Sequence[Run]) -> list[str]:
    """Return the engines' values of open settings, once for all runs with the same values."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        words = {k: v for k, v in run.engine.items() if v != "null" and k != "engine"}
        if words:
            said = ", ".join(f"{key} {value}" for key, value in words.items())
            labels.setdefault(said, []).append(run.label)
    return [f"{', '.join(dict.fromkeys(who))} ran with {said}." for said, who in labels.items()]
