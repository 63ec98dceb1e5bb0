"""Rows -> the tables of docs/benchmarks.md, between its two markers."""

from __future__ import annotations

import datetime
import os
import platform
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import targets
from zeroexp.cluster.environment import processor_name
from zeroexp.config.keys import ConfigError
from zeroexp.report import markdown as report
from zeroexp.report.compare import BELOW

MB = 1e6
HEAD = """\
| engine | stage | step, ms | quartiles | / limit | / DDP | peak, MB | allocated a step, MB | sent, MB | form, MB |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"""


def markdown(rows: list[dict[str, Any]]) -> str:
    """One table per comparison, under a line that says where and when."""
    parts = [_circumstances(rows)]
    for name, comparison in groupby(rows, key=lambda row: row["comparison"]):
        engines = list(comparison)
        first = engines[0]
        clipped = ", gradients clipped" if first["clip"] else ""
        parts.append(
            f"### {name}: {first['model']}, {first['world_size']} ranks, {first['link']}, "
            f"{first['precision']}{clipped}"
        )
        parts.append("\n".join([HEAD, *(_line(row) for row in engines)]))
    return "\n\n".join([*parts, "### Against the targets", targets.markdown(rows)])


def replace_in(page: Path, text: str, name: str = "measured") -> None:
    """Put `text` between the markers of this name on the page."""
    try:
        report.replace_in(page, text, name)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


def _circumstances(rows: list[dict[str, Any]]) -> str:
    turns = sorted({row["num_turns"] for row in rows})
    loads = [row["load_before"] for row in rows]
    return report.wrapped(
        f"{machine()} Medians of {turns[0]}–{turns[-1]} turns; load average before each comparison "
        f"{min(loads):.1f}–{max(loads):.1f}."
    )


def machine() -> str:
    """When, on what, with which versions."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"Measured on {today}: {processor_name()}, {os.cpu_count()} cores, one thread per rank; Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}."
    )


def _line(row: dict[str, Any]) -> str:
    low, high = row["step_seconds_quartiles"]
    cells = [
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
    return f"| {' | '.join(cells)} |"


def _to_limit(row: dict[str, Any]) -> str:
    """Return the ratio to the limit, which computes and never communicates: whoever is faster measured noise."""
    ratio = row["ratio_to_limit"]
    return f"{ratio:.2f}{', noise' if ratio < BELOW else ''}"


def megabytes(num_bytes: float | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / MB:.0f}"
