"""What was measured -> docs/measured.md, between the markers of a section, and every row -> benchmarks/measured/."""

from __future__ import annotations

import csv
import datetime
import io
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import targets
from zeroexp.config.keys import ConfigError
from zeroexp.plan.machines import processor_name
from zeroexp.report import markdown as report

MB = 1e6
BELOW = 0.98  # of the time of who only computes: what lies further below is noise
ROWS = (
    Path(__file__).parent / "measured"
)  # every row of what a page sums up, a file for each section
# Comparisons on the page; the others lie in its rows.
ON_PAGE = ("small", "135m", "small_1gbit", "small_bf16", "small_4_ranks")
HEAD = (
    *("comparison", "engine", "stage", "step, ms", "quartiles", "/ limit", "/ DDP", "peak, MB"),
    *("allocated a step, MB", "sent, MB", "form, MB"),
)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return what the page says: a column for each comparison it has room for, a row for each engine there."""
    shown = [row for row in rows if row["comparison"] in ON_PAGE] or rows
    names = list(dict.fromkeys(row["comparison"] for row in shown))
    # DDP with masters does the work of the rows beside it, and DDP of bf16 alone does not.
    several = [
        row
        for row in shown
        if row["engine"] == "ddp_master" or len(_comparisons_of(row["engine"], shown)) > 1
    ] or shown
    parts = [_circumstances(rows), "\n".join(map(_described, _first_of_each(shown)))]
    parts.append(_pivot(several, names, _to_ddp_and_peak))
    return "\n\n".join([*parts, report.wrapped(targets.summary(rows))])


def _comparisons_of(engine: str, rows: Iterable[Mapping[str, Any]]) -> set[str]:
    return {row["comparison"] for row in rows if row["engine"] == engine}


def cells(rows: Iterable[Mapping[str, Any]]) -> list[Sequence[str]]:
    """Return every row, below the names of the columns."""
    return [HEAD, *map(_line, rows)]


def tell(name: str, text: str, rows: Sequence[Sequence[str]], page: Path | None) -> None:
    """Print what a section says and its rows, if it sums some up; with a page, write both."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    print(text, buffer.getvalue(), sep="\n\n")
    if page is not None:
        replace_in(page, text, name)
        if rows:
            (ROWS / f"{name}.csv").write_text(buffer.getvalue(), encoding="utf-8")


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], num_words: int = 1) -> str:
    """Return a table of Markdown whose first columns are words and whose others are numbers.

    It has no bars at its ends, so that no first cell may be empty.
    """
    rule = "|".join(["---"] * num_words + ["---:"] * (len(head) - num_words))
    first, *others = (" | ".join(each).rstrip() for each in (head, *rows))
    return "\n".join([first, rule, *others])


def _pivot(
    rows: Sequence[dict[str, Any]], names: Sequence[str], cell: Callable[[dict[str, Any]], str]
) -> str:
    known = {(row["engine"], row["comparison"]): cell(row) for row in rows}
    engines = dict.fromkeys(row["engine"] for row in rows)
    lines = [[engine, *(known.get((engine, name), "") for name in names)] for engine in engines]
    return grid(["engine", *names], lines)


def _first_of_each(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({row["comparison"]: row for row in reversed(list(rows))}.values())[::-1]


def _described(row: Mapping[str, Any]) -> str:
    """Say what a comparison is, on the row of its first engine."""
    clipped = ", gradients clipped" if row["clip"] else ""
    ranks = "rank" if row["world_size"] == 1 else "ranks"
    return (
        f"* {row['comparison']}: {row['model']}, {row['world_size']} {ranks}, {row['link']}, "
        f"{row['precision']}{clipped}"
    )


def _to_ddp_and_peak(row: Mapping[str, Any]) -> str:
    """Return the step over DDP's, of DDP itself in ms, and the peak in MB."""
    if row["engine"] == "ddp":
        step = f"{1e3 * row['step_seconds']:.0f} ms"
    else:
        noise = ", noise" if row["ratio_to_limit"] < BELOW else ""
        step = f"{row['ratio_to_ddp']:.2f}{noise}"
    return f"{step}, {megabytes(row['peak_bytes'])}"


def replace_in(page: Path, text: str, name: str = "measured") -> None:
    """Put `text` between the markers of this name on the page."""
    try:
        report.replace_in(page, text, name)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


def _circumstances(rows: list[dict[str, Any]]) -> str:
    turns = sorted({row["num_turns"] for row in rows})
    others = [row["other_cores"] for row in rows]
    return report.wrapped(
        f"{machine()} Medians of {turns[0]}–{turns[-1]} turns; other programs used "
        f"{min(others):.1f}–{max(others):.1f} cores meanwhile."
    )


def machine() -> str:
    """When, on what, with which versions."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"{today}, {processor_name()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}."
    )


def _line(row: Mapping[str, Any]) -> list[str]:
    low, high = row["step_seconds_quartiles"]
    return [
        row["comparison"],
        row["engine"],
        row["stage"],
        f"{1e3 * row['step_seconds']:.0f}",
        f"{1e3 * low:.0f}–{1e3 * high:.0f}",
        _to_limit(row),
        f"{row['ratio_to_ddp']:.2f}",
        *(
            megabytes(row[key])
            for key in ("peak_bytes", "allocated_bytes", "wire_bytes", "form_bytes")
        ),
    ]


def _to_limit(row: Mapping[str, Any]) -> str:
    """Return the ratio to the limit, which computes and never communicates: whoever is faster measured noise."""
    ratio = row["ratio_to_limit"]
    return f"{ratio:.2f}{', noise' if ratio < BELOW else ''}"


def megabytes(num_bytes: float | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / MB:.0f}"
