"""The final table of a sweep: the cost of every point, one row each, aligned for a terminal.

A column without information (master weights of an fp32 run, a mean equal to the fullest rank) is left out. If two
points share strategy, implementation and world size, the settings that differ between them become columns.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from textwrap import wrap

from zeroexp.report.columns import Column, columns_to_show, of_parts
from zeroexp.report.meanings import meanings_of
from zeroexp.report.measured_points import MeasuredPoint
from zeroexp.report.tables import Table

# What a narrow terminal shows, the most important first; rows keep the order of the wide table.
BRIEF = (
    *("status", "step", "total", "peak", "loss", "sent/step", "planned", "tokens/s", "MFU"),
    *("predicted", "params"),
)
WIDTH = 110  # characters in the text below the table
LEFT_OUT = "More columns: a wider terminal, zeroexp report FOLDER --csv -, the page."


def print_table(points: Sequence[MeasuredPoint]) -> None:
    """Print the table, if there are points; a terminal gets it fitted to its width, a pipe in its full width."""
    if points:
        print(render(points, _terminal_width()))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines; a terminal gets them wrapped to its width under their own indent, a pipe as they are."""
    width = _terminal_width()
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        print("\n".join(wrap(line, width, subsequent_indent=indent)) if width else line)


def _terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def render(points: Sequence[MeasuredPoint], width: int | None = None) -> str:
    """Return a header of two lines (name, unit), one line per point, and the meaning of each number.

    If that is wider than `width` characters (None: no limit), values that all points share move into a caption. If it
    is still too wide, only those columns of BRIEF are left that fit, and the rest is the page's.
    """

    def fits(columns: Sequence[Column]) -> bool:
        # But for the reasons, which are last in their row.
        return width is None or len(Table.of(points, columns).lines()[2]) <= width

    columns, caption, left_out = columns_to_show(points), "", []
    if not fits(columns):
        shared = [c for c in of_parts(columns, "point") if not c.differs(points)]
        same = ", ".join(f"{c.name} {c.text(points[0])}" for c in shared)
        caption = f"all points: {same}\n\n" if same else ""
        columns = [column for column in columns if column not in shared]
    if not fits(columns):
        columns, left_out = _brief_columns(columns, fits), [LEFT_OUT]
    words = " ".join([*left_out, *meanings_of(points, columns)])
    below = wrap(words, min(width or WIDTH, WIDTH))
    return caption + "\n".join([*Table.of(points, columns).lines(), *below])


def _brief_columns(
    columns: Sequence[Column], fits: Callable[[Sequence[Column]], bool]
) -> list[Column]:
    """Return the columns of a point and those of BRIEF that fit beside them, the first ones first."""
    point = of_parts(columns, "point")
    if [column.name for column in point[:2]] == ["strategy", "implementation"]:
        point = [Column("engine", lambda p: p.run.label, "engine"), *point[2:]]
    chosen: list[Column] = []
    for name in BRIEF:
        more = next((column for column in columns if column.name == name), None)
        if more and fits([*point, *chosen, more]):
            chosen.append(more)
    return [*point, *(column for column in columns if column in chosen)]
