"""Groups and places of ranks: every rank is in one group and in one row of holders, and the cuts follow both."""

from __future__ import annotations

import pytest

from zeroexp.cut.rank_grid import RankGrid


def test_the_grid_of_its_page():
    grid = RankGrid(6, 2)
    assert [list(grid.group(rank)) for rank in (0, 4)] == [[0, 1, 2], [3, 4, 5]]
    assert [list(grid.holders(rank)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert grid.by_place == (0, 3, 1, 4, 2, 5)


@pytest.mark.parametrize(("size", "num_groups"), [(1, 1), (6, 1), (6, 2), (6, 6), (12, 4)])
def test_each_rank_is_where_its_numbers_say(size, num_groups):
    grid = RankGrid(size, num_groups)
    assert sorted(grid.by_place) == list(range(size))
    for rank in range(size):
        assert grid.group(rank)[grid.place(rank)] == rank
        assert grid.holders(rank)[grid.group_number(rank)] == rank
        assert grid.by_place[grid.number_by_place(rank)] == rank
