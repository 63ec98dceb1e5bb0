"""The final table of a sweep: the cost of every point, one row each, aligned for a terminal.

A column without information (master weights of an fp32 run, a mean equal to the fullest rank) is left out. If two
points share strategy, implementation and world size, the settings that differ between them become columns.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from textwrap import wrap

from zeroexp.report.columns import columns_of, describe_peak_flops, shares_memory
from zeroexp.report.settings import Column
from zeroexp.tracking.run import Run

ENGINE = ("strategy", "implementation")
# What a narrow terminal shows, the most important first; rows keep the order of the wide table.
BRIEF = (
    *("status", "step", "total", "peak", "loss", "sent/step", "tokens/s", "MFU", "planned"),
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

    def fits(columns: Sequence[Column]) -> bool:
        # But for the reasons, which are last in their row.
        return width is None or len(_lines(runs, columns)[2]) <= width

    columns = columns_of(runs)
    memory, traffic = [*_flat(columns.memory), *columns.planned], _flat(columns.traffic)
    times = [*columns.losses, *columns.times]
    results = [*times, *memory, *traffic, columns.status]
    if fits([*columns.point, *results]):
        return _text([], [[*columns.point, *results]], _meanings(runs), runs, WIDTH)
    point = [column for column in columns.point if column.differs(runs)]
    shared = [f"{c.name} {c.value(runs[0])}" for c in columns.point if c not in point]
    caption = [f"all points: {', '.join(shared)}"] if shared else []
    halves = [[*point, *times, *traffic, columns.status], [*point, *memory]]
    tables = next((each for each in ([[*point, *results]], halves) if all(map(fits, each))), None)
    if tables:
        return _text(caption, tables, _meanings(runs), runs, width)
    brief = _brief_columns(point, results, fits)
    return _text(caption, [brief], _brief_meanings(runs), runs, width)


def _text(
    caption: Sequence[str],
    tables: Sequence[Sequence[Column]],
    meanings: Sequence[str],
    runs: Sequence[Run],
    width: int | None,
) -> str:
    above, below = (wrap(" ".join(x), min(width or WIDTH, WIDTH)) for x in (caption, meanings))
    blocks = [above] * bool(above) + [_lines(runs, columns) for columns in tables]
    return "\n".join(["\n\n".join(map("\n".join, blocks)), *below])


def _brief_columns(
    point: Sequence[Column], results: Sequence[Column], fits: Callable[[Sequence[Column]], bool]
) -> list[Column]:
    """Return the columns of a point and those of BRIEF that fit beside them, the first ones first."""
    engine = [column for column in point if column.name in ENGINE]
    if len(engine) == len(ENGINE):
        both = Column("engine", "", lambda run: "/".join(c.value(run) for c in engine), left=True)
        point = [both, *(column for column in point if column not in engine)]
    chosen: list[Column] = []
    for name in BRIEF:
        more = next((column for column in results if column.name == name), None)
        if more and fits([*point, *chosen, more]):
            chosen.append(more)
    return [*point, *(column for column in results if column in chosen)]


def _flat(groups: Sequence[Sequence[Column]]) -> list[Column]:
    return [column for group in groups for column in group]


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


def _meanings(runs: Sequence[Run]) -> list[str]:
    summaries = [run.summary for run in runs if run.summary]
    steps = sorted({(s.num_steps, s.num_warmup_steps) for s in summaries})
    counted = " or ".join(f"{n} steps after {warmup} of warm-up" for n, warmup in steps)
    sentences = [
        f"step, tokens/s: rank 0 over {counted}." if steps else "",
        "params, grads, optimizer: the most held at any of the moments at rest, after forward, after backward, after "
        "step, on the fullest rank (mean: over ranks, where they differ by more than 2 %).",
        "total: the most of all kinds held at one moment, so it may be less than their sum.",
        "peak: the most allocated at once during any step, activations included; – where it cannot be known.",
        "planned: the total that closed forms say of the same run (zeroexp plan)."
        if any("total" in s.plan for s in summaries)
        else "",
        "build: the most allocated at once before the first step."
        if any(s.memory.build_peak for s in summaries)
        else "",
        "sent/step: what the rank that sends most handed to others in one step",
        "(by TCP: what of it left through the network; ranks of one host may read each other's memory)."
        if shares_memory(runs)
        else "through the network.",
        describe_peak_flops(runs),
        *_engine_meanings(runs),
        *_stage_meanings(runs),
    ]
    return [sentence for sentence in sentences if sentence]


def _brief_meanings(runs: Sequence[Run]) -> list[str]:
    return [
        "step: the median of rank 0. total, peak: the most that the fullest rank held at one moment, and had allocated "
        "at once. More columns: a wider terminal, zeroexp report FOLDER --csv -, the page.",
        *_stage_meanings(runs),
    ]


def _stage_meanings(runs: Sequence[Run]) -> list[str]:
    return [NOTES[label] for label in dict.fromkeys(run.label for run in runs) if label in NOTES]


def _engine_meanings(runs: Sequence[Run]) -> list[str]:
    """Return the engines' values of open settings, once for all runs with the same values."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        settings = {k: v for k, v in run.engine.items() if v != "null" and k != "engine"}
        if settings:
            text = ", ".join(f"{key} {value}" for key, value in settings.items())
            labels.setdefault(text, []).append(run.label)
    return [f"{', '.join(dict.fromkeys(who))} ran with {text}." for text, who in labels.items()]
