"""Tables and sentences of a plan for 80 columns: one builder for every answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

WIDTH = 80
MIB, GIB = 2**20, 2**30
WORDS = ("frontier", "model", "strategy", "implementation", "settings")  # are aligned left
Row = dict[str, Any]  # figures by their names, as in CSV


def lines_of(heads: Mapping[str, str], rows: Sequence[Row], size: int, num_fixed: int) -> list[str]:
    """Return the lines of a table of these figures, bytes in units of `size`, under their heads.

    Columns that do not fit follow in further tables, beside the first `num_fixed`.
    """
    columns = [_column(key, head, rows, size) for key, head in heads.items()]
    fixed = columns[:num_fixed]
    tables = [[*fixed]]
    for column in columns[num_fixed:]:
        width = sum(len(cells[0]) + 1 for cells in [*tables[-1], column]) - 1
        if width > WIDTH and len(tables[-1]) > num_fixed:
            tables.append([*fixed])
        tables[-1].append(column)
    lines: list[str] = []
    for table in tables:
        lines += [""] if lines else []
        lines += [" ".join(cells).rstrip() for cells in zip(*table, strict=True)]
    return lines


def _column(key: str, head: str, rows: Sequence[Row], size: int) -> list[str]:
    """Return the texts below each other, all as wide as the longest."""
    texts = [head, *(_cell(key, row.get(key), size) for row in rows)]
    width = max(map(len, texts))
    return [each.ljust(width + 1) if key in WORDS else each.rjust(width) for each in texts]


def _cell(key: str, value: Any, size: int) -> str:
    if isinstance(value, str):
        return value
    if "_bytes" in key:
        return amount(value or 0, size)
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)


def wrapped(*sentences: str) -> list[str]:
    """Return the lines of sentences, each of which begins on a line of its own."""
    return [
        line
        for each in sentences
        for line in wrap(each, WIDTH, break_long_words=False, break_on_hyphens=False)
    ]


def unit_of(amounts: Sequence[float]) -> tuple[str, int]:
    """Return the unit in which the largest amount has few digits."""
    return ("GiB", GIB) if max(amounts, default=0) >= 10 * GIB else ("MiB", MIB)


def amount(num_bytes: float, size: int) -> str:
    return f"{num_bytes / size:,.2f}" if size == GIB else f"{num_bytes / size:,.1f}"
