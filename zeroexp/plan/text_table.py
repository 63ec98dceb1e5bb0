"""Tables and sentences of a plan for 80 columns: one builder for every answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Generic, TypeVar

WIDTH = 80
MIB, GIB = 2**20, 2**30
Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column of a table whose rows are of any kind."""

    name: str
    value: Callable[[Row], str]
    left: bool = False


def lines_of(columns: Sequence[Column[Row]], rows: Sequence[Row], num_fixed: int) -> list[str]:
    """Return the lines of a table; columns that do not fit follow in further ones, beside the first `num_fixed`."""
    texts = [[column.name, *(column.value(row) for row in rows)] for column in columns]
    widths = [max(map(len, cells)) for cells in texts]
    tables: list[list[int]] = [list(range(num_fixed))]
    for index in range(num_fixed, len(columns)):
        wide = sum(widths[i] + 1 + columns[i].left for i in [*tables[-1], index]) - 1
        if wide > WIDTH and len(tables[-1]) > num_fixed:
            tables.append(list(range(num_fixed)))
        tables[-1].append(index)
    lines: list[str] = []
    for table in tables:
        lines += [""] if lines else []
        for row in range(len(rows) + 1):
            cells = (
                texts[i][row].ljust(widths[i] + 1)
                if columns[i].left
                else texts[i][row].rjust(widths[i])
                for i in table
            )
            lines.append(" ".join(cells).rstrip())
    return lines


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


def mib(num_bytes: float, sign: str = "") -> str:
    """Return bytes in MiB; sign: `+` shows it, and no zero has one."""
    return format(num_bytes / MIB, f"{sign}{'z' if sign else ''},.1f")
