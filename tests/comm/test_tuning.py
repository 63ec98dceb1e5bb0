"""What a reduction costs on these links: the arithmetic exactly, the measurement on real ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from zeroexp.comm.base import Pending, ReducePart
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.tuning import PROBED_BYTES, fit_link, measure_moves
from zeroexp.process.world import World

SIZES = (1 << 16, 1 << 19, 1 << 22)


@pytest.mark.parametrize("latency", [0.0, 5e-5, 2e-3])
@pytest.mark.parametrize("bandwidth", [25e6, 119e6, 6e9])
def test_points_on_a_line_give_that_line(latency, bandwidth):
    link = fit_link(SIZES, [latency + size / bandwidth for size in SIZES])
    assert link.latency_seconds == pytest.approx(latency, abs=1e-12)
    assert link.bytes_per_second == pytest.approx(bandwidth)


def test_times_that_fall_with_size_give_neither_a_negative_latency_nor_a_negative_bandwidth():
    link = fit_link(SIZES, [3e-4, 2e-4, 1e-4])
    assert link.latency_seconds >= 0 and 0 < link.bytes_per_second < math.inf


def probed_bytes(world: World) -> set[int]:
    """Of the gradients that are reduced while measuring."""
    sizes: set[int] = set()
    reduce = Collectives.reduce_scatter

    def noting(self: Collectives, parts: Sequence[ReducePart], *words: str) -> Pending:
        sizes.add(sum(g.nbytes for part in parts for g in part.gradients))
        return reduce(self, parts, *words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "reduce_scatter", noting)
        measure_moves(world)
    return sizes


def test_what_is_timed_is_as_large_as_the_line_says(ranks):
    assert ranks(probed_bytes) == [set(PROBED_BYTES)] * 2


@pytest.mark.parametrize("transport", ["direct", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_measure_the_same(ranks, transport, world_size):
    seconds = ranks(measured, transport, world_size=world_size)
    assert seconds == [seconds[0]] * world_size, "those of the slowest rank"
    assert all(0 < each < 10 for each in seconds[0])


def measured(world: World, transport: str) -> list[float]:
    return measure_moves(world, transport=transport)
