"""Bucket sizes from measured links: the arithmetic exactly, the measurement on real ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from zeroexp.comm.base import Pending, ReducePart
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.tuning import LEAST_MB, MIB, MOST_MB, PROBED_BYTES, Link, fit_link, measure_link
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


@pytest.mark.parametrize("latency, bandwidth", [(1e-4, 6e9), (5e-4, 119e6), (1e-3, 1e9)])
def test_a_bucket_pays_at_most_a_tenth_for_latency_and_half_of_it_would_pay_more(
    latency, bandwidth
):
    link = Link(latency, bandwidth)
    seconds = link.bucket_mb * MIB / bandwidth
    assert latency / (latency + seconds) <= 0.1
    assert latency / (latency + seconds / 2) > 0.1


def test_a_choice_stays_within_its_bounds():
    assert Link(0.0, 1e9).bucket_mb == LEAST_MB
    assert Link(1.0, 1e12).bucket_mb == MOST_MB


def probed_bytes(world: World) -> set[int]:
    """Of the gradients that are reduced while measuring."""
    sizes: set[int] = set()
    reduce = Collectives.reduce_scatter

    def noting(self: Collectives, parts: Sequence[ReducePart], *words: str) -> Pending:
        sizes.add(sum(g.nbytes for part in parts for g in part.gradients))
        return reduce(self, parts, *words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "reduce_scatter", noting)
        measure_link(world)
    return sizes


def test_what_is_timed_is_as_large_as_the_line_says(ranks):
    assert ranks(probed_bytes) == [set(PROBED_BYTES)] * 2


def measured(world: World, transport: str) -> Link:
    return measure_link(world, transport=transport)


@pytest.mark.parametrize("transport", ["direct", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_measure_the_same_link(ranks, transport, world_size):
    links = ranks(measured, transport, world_size=world_size)
    assert len(set(links)) == 1, "a bucket must have one size"
    assert 0 <= links[0].latency_seconds < 10
    assert 1e6 < links[0].bytes_per_second < 1e13
