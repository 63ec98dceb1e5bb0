"""`python -m benchmarks.published_page > docs/published.md`: published figures beside ours, as a page.

With the names of studies (`table_a` to `table_d`, `traffic`): their tables alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from textwrap import wrap

from benchmarks.published import (
    ComparedCell,
    PublishedTable,
    compare_cells,
    sent_with_redundant_optimizers,
)
from benchmarks.published_tables import TABLES
from benchmarks.table import grid
from zeroexp.plan.__main__ import composed_points
from zeroexp.plan.plan_points import Plans
from zeroexp.process import safe_output

COMMAND = "python -m benchmarks.published_page > docs/published.md"
INTRODUCTION = (
    "Does a plan give the figures that were published? Each stands beside what `zeroexp plan study=<name>` predicts, "
    "in brackets where its digits are others; both agree if they differ by no more than the rounding of what was "
    f"published. This page is the output of `{COMMAND}`."
)


def main() -> int:
    safe_output.ignore_output_errors()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="*", choices=[[], *(t.study for t in TABLES)])
    asked = parser.parse_args().studies
    print(page() if not asked else sections(asked))
    return 0


def sections(studies: Sequence[str]) -> str:
    return "\n\n".join(section(t, compare_study(t)) for t in TABLES if t.study in studies)


def page() -> str:
    parts = ["# Published tables, planned", _wrapped(INTRODUCTION)]
    parts += [sections([table.study for table in TABLES]), _redundant_optimizers()]
    return "\n\n".join(parts)


def compare_study(table: PublishedTable) -> list[ComparedCell]:
    """Plan the table's study and compare every cell."""
    plans = Plans(composed_points([f"study={table.study}", "cluster.device=cuda"]))
    points = [(each.config.strategy, each.form) for each in plans.planned]
    return compare_cells(table, {(s.name, s.implementation): form for s, form in points})


def section(table: PublishedTable, cells: list[ComparedCell]) -> str:
    """Return the table's section: a line for each point, then what differs and why."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        rows.setdefault("-".join(cell.row.engine), {})[cell.column] = _text(cell)
    lines = [[point, *(row.get(column, "") for column in columns)] for point, row in rows.items()]
    why = [_wrapped(text) for text in _reasons_of_differences(table)]
    unit = _wrapped(f"`study={table.study}`; {table.unit}.")
    return "\n\n".join([f"## {table.title}", unit, grid(["point", *columns], lines), *why])


def _text(cell: ComparedCell) -> str:
    """Return the published figure; behind it ours where its digits are others, and that of the model as it is."""
    ours = f"{cell.ours:.{max(cell.digits, 2)}f}"
    parts = [] if float(ours) == float(cell.published) else [f"planned {ours}"]
    parts += [] if cell.actual is None else [f"as it is {cell.actual:.2f}"]
    parts += [] if cell.agrees else ["**differs**"]
    return f"{cell.published} ({', '.join(parts)})" if parts else cell.published


def _reasons_of_differences(table: PublishedTable) -> Iterator[str]:
    for row in table.rows:
        if row.why:
            yield f"{'-'.join(row.engine)}: {row.why}"
    yield from table.notes


def _redundant_optimizers() -> str:
    """Return the section about K redundant optimizers, which is arithmetic alone."""
    slow, total = sent_with_redundant_optimizers(num_slow=4, num_fast=2)
    lines = [
        "## K redundant optimizers, N = 8 ranks in 4 slow groups of 2 fast ones, K = 4",
        _wrapped(
            "`strategy=zero1 strategy.replicas=4`, by arithmetic. tests/cluster/test_emulated_network.py reads 6P/8 a "
            "rank, within 1 %, from the interfaces of four nodes of two behind a `cluster.link`; without "
            "groups it would be 12P/8."
        ),
        _wrapped(
            f"Published, and computed: 6/8 P ({slow:.3f}) over slow links, which is 62.5 % "
            f"({100 * (1 - slow / 2):.1f} %) less than 2 P; 1.75 P ({total:.2f}) in all."
        ),
    ]
    return "\n\n".join(lines)


def _wrapped(text: str) -> str:
    return "\n".join(wrap(text, 100, break_long_words=False, break_on_hyphens=False))


if __name__ == "__main__":
    sys.exit(main())
