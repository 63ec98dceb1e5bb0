"""What a reduction costs on these links: the arithmetic exactly, the measurement on real ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from zeroexp.calibrate.rates import PROBED_BYTES, fit_reduction_cost, measure_reductions
from zeroexp.comm.base import Pending, ReducePart
from zeroexp.comm.collectives import Collectives
from zeroexp.process.world import World

SIZES = (1 << 16, 1 << 19, 1 << 22)


@pytest.mark.parametrize("latency", [0.0, 5e-5, 2e-3])
@pytest.mark.parametrize("bandwidth", [25e6, 119e6, 6e9])
def test_points_on_a_line_give_that_line(latency, bandwidth):
    cost = fit_reduction_cost(SIZES, [latency + size / bandwidth for size in SIZES])
    assert cost.latency_seconds == pytest.approx(latency, abs=1e-12)
    assert cost.bytes_per_second == pytest.approx(bandwidth)


def test_times_that_fall_with_size_give_neither_a_negative_latency_nor_a_negative_bandwidth():
    cost = fit_reduction_cost(SIZES, [3e-4, 2e-4, 1e-4])
    assert cost.latency_seconds >= 0 and 0 < cost.bytes_per_second < math.inf


def measured(world: World, transport: str) -> tuple[set[int], list[float]]:
    """The bytes of the gradients that are reduced while measuring, and what is measured."""
    sizes: set[int] = set()
    reduce = Collectives.reduce_scatter

    def noting(self: Collectives, parts: Sequence[ReducePart], *words: str) -> Pending:
        sizes.add(sum(g.nbytes for part in parts for g in part.gradients))
        return reduce(self, parts, *words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "reduce_scatter", noting)
        return sizes, measure_reductions(world, transport=transport)


@pytest.mark.parametrize(("transport", "world_size"), [("direct", 3), ("gloo", 2)])
def test_all_ranks_measure_the_same_of_what_the_line_says(ranks, transport, world_size):
    sizes, seconds = zip(*ranks(measured, transport, world_size=world_size), strict=True)
    assert list(sizes) == [set(PROBED_BYTES)] * world_size
    assert list(seconds) == [seconds[0]] * world_size, "those of the slowest rank"
    assert all(0 < each < 10 for each in seconds[0])
