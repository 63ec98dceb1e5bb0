"""The fewest ranks at which model states fit: each number of them is planned."""

from __future__ import annotations

import pytest

from tests.composing import composed
from zeroexp.config.keys import Config
from zeroexp.plan.form_of_config import build_on_meta
from zeroexp.plan.outcome import plan_point
from zeroexp.plan.remedy import most_ranks, smallest_world, with_world


def fewest(config: Config, limit_mib: float, *, above: int = 0) -> int | None:
    config.cluster.device_memory_gib = limit_mib / 1024
    return smallest_world(config, build_on_meta(config), "cpu", above=above)


def states_mib(config: Config, world_size: int) -> float:
    outcome = plan_point(with_world(config, world_size), None, "cpu").outcome
    return outcome.total.fullest / 2**20


def test_a_point_that_fits_one_rank_needs_no_more():
    config = composed("model=tiny", "strategy=zero3", "world_size=8")
    assert fewest(config, 1024) == 1
    assert fewest(config, 1024, above=2) == 4


@pytest.mark.parametrize("size", [2, 4])
def test_half_of_the_fewest_ranks_do_not_fit(size):
    config = composed("model=tiny", "strategy=zero3", "world_size=1")
    held, half = states_mib(config, size), states_mib(config, size // 2)
    assert held < half
    assert fewest(config, held) == size


def test_no_number_of_ranks_makes_the_largest_unit_smaller():
    config = composed("model=tiny", "strategy=ddp", "world_size=1")
    assert fewest(config, 1) is None
    assert most_ranks("cpu") < most_ranks("cuda")


def test_one_rank_lays_out_nothing_for_others():
    config = composed("model=tiny", "strategy=zero2", "world_size=1")
    buffers: list[float] = []
    for size in (1, 2):
        outcome = plan_point(with_world(config, size), None, "cpu").outcome
        buffers.append(outcome.by_kind["buffers"].fullest)
    assert buffers[0] == 0 < buffers[1]
