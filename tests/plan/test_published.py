"""Every published cell is reproduced to its rounding, or a sentence says why not: docs/published.md shows all."""

from __future__ import annotations

from dataclasses import replace
from math import copysign
from pathlib import Path

import pytest

from benchmarks.published import Engine, sent_with_redundant_optimizers
from benchmarks.published_page import compare_study, page
from benchmarks.published_tables import TABLES, PublishedTable

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "published.md"
# Cells in which the publication is known to differ; all others must agree.
DIFFER = {
    "table_d": [("zero1-buffer", "saving")],
    "traffic": [("zero1-torch", "times"), ("zero3-torch", "times")],
}


def check_cells(table: PublishedTable) -> None:
    cells = compare_study(table)
    assert len(cells) == sum(len(row.cells) for row in table.rows), (
        "a row has no point in the study"
    )
    different = [c for c in cells if not c.agrees]
    assert [("-".join(c.row.engine), c.column) for c in different] == DIFFER.get(table.study, [])
    assert all(c.row.why for c in different)


@pytest.mark.parametrize("table", TABLES[1:4], ids=lambda table: table.study)
def test_every_cell_of_the_small_tables(table):
    check_cells(table)


def test_a_figure_that_is_off_by_one_in_its_last_digit_differs() -> None:
    table, off = TABLES[3], dict[tuple[Engine, str], str]()
    for cell in compare_study(table):
        published = float(cell.published)
        wrong = published + copysign(10**-cell.digits, published - cell.ours)
        off[cell.row.engine, cell.column] = f"{wrong:.{cell.digits}f}"
    rows = [replace(row, cells={c: off[row.engine, c] for c in row.cells}) for row in table.rows]
    assert not any(cell.agrees for cell in compare_study(replace(table, rows=rows)))


@pytest.mark.slow
@pytest.mark.parametrize("table", [TABLES[0], TABLES[4]], ids=lambda table: table.study)
def test_every_cell_of_the_large_tables(table):
    check_cells(table)


@pytest.mark.slow
def test_the_page_is_what_its_command_prints():
    assert PAGE.read_text() == page() + "\n"


def test_redundant_optimizers_trade_slow_links_for_fast_ones():
    """Published for N = 8, K = 4: 6P/8 over slow links, and the ring's exact total for every K."""
    assert sent_with_redundant_optimizers(num_slow=4, num_fast=2) == (6 / 8, 2 * 7 / 8)
    for num_slow in (1, 2, 4, 8):
        slow, total = sent_with_redundant_optimizers(num_slow, 8 // num_slow)
        assert total == pytest.approx(2 * 7 / 8) and slow <= total
