"""What was measured -> docs/measured.md, between the markers of a section, and every row -> benchmarks/measured/."""

from __future__ import annotations

import csv
import datetime
import io
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
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
HEAD = (
    *("comparison", "engine", "stage", "step, ms", "quartiles", "/ limit", "/ DDP", "peak, MB"),
    *("allocated a step, MB", "sent, MB", "form, MB"),
)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return what the page says: a column for each comparison, a row for each engine; then the targets."""
    names = list(dict.fromkeys(row["comparison"] for row in rows))
    shaped = [row for row in rows if row["link"] != "loopback"]
    parts = [_circumstances(rows), "\n".join(map(_described, _first_of_each(rows)))]
    parts.append("### Step, over DDP's\n\n" + _pivot(rows, names, _to_ddp))
    parts.append("### Peak, MB\n\n" + _pivot(rows, names, lambda r: megabytes(r["peak_bytes"])))
    if shaped:
        named = [name for name in names if any(row["comparison"] == name for row in shaped)]
        parts.append("### Sent a step, MB\n\n" + _pivot(shaped, named, _sent))
    return "\n\n".join([*parts, "### Against the targets", targets.markdown(rows)])


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
    """Return a table of Markdown whose first columns are words and whose others are numbers."""
    rules = ["---"] * num_words + ["---:"] * (len(head) - num_words)
    return "\n".join(f"| {' | '.join(each)} |" for each in (head, rules, *rows))


def _pivot(
    rows: Sequence[dict[str, Any]], names: Sequence[str], cell: Callable[[dict[str, Any]], str]
) -> str:
    known = {(row["engine"], row["comparison"]): cell(row) for row in rows}
    engines = dict.fromkeys(row["engine"] for row in rows)
    lines = [[engine, *(known.get((engine, name), "") for name in names)] for engine in engines]
    return grid(["engine", *names], lines)


def _first_of_each(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [next(of_one) for _, of_one in groupby(rows, key=lambda row: row["comparison"])]


def _described(row: Mapping[str, Any]) -> str:
    """Say what a comparison is, on the row of its first engine."""
    clipped = ", gradients clipped" if row["clip"] else ""
    ranks = "rank" if row["world_size"] == 1 else "ranks"
    return (
        f"* {row['comparison']}: {row['model']}, {row['world_size']} {ranks}, {row['link']}, "
        f"{row['precision']}{clipped}"
    )


def _to_ddp(row: Mapping[str, Any]) -> str:
    ratio = f"{row['ratio_to_ddp']:.2f}"
    if row["engine"] == "ddp":
        return f"{1e3 * row['step_seconds']:.0f} ms"
    return f"{ratio}, noise" if row["ratio_to_limit"] < BELOW else ratio


def _sent(row: Mapping[str, Any]) -> str:
    return f"{megabytes(row['wire_bytes'])} of {megabytes(row['form_bytes'])}"


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
        f"Measured on {today}: {processor_name()}, {os.cpu_count()} cores, one thread per rank; Python "
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
