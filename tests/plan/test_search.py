"""The search of a plan: the fewest ranks at which model states fit, and the largest number whose peak does."""

from __future__ import annotations

import pytest

from tests.composing import composed
from zeroexp.plan.changes import with_world
from zeroexp.plan.fewest_ranks import largest
from zeroexp.plan.outcome import plan_point
from zeroexp.plan.search import MOST_RANKS, first_that_fits, more_ranks

MIB = 2**20
# Peaks over a number of samples or tokens.
PEAKS = {
    "a line": lambda n: 100 * MIB + 3000 * n,
    "model states, then a line": lambda n: max(100 * MIB, 40 * MIB + 3000 * n),
    "a parabola": lambda n: 100 * MIB + 3000 * n + 7 * n * n,
    "a flat line": lambda n: 100 * MIB,
    "steps": lambda n: 100 * MIB + 3_000_000 * (n // 1000),
}


@pytest.mark.parametrize("kind", PEAKS)
@pytest.mark.parametrize(("step", "most"), [(1, 65536), (64, 100), (64, 2048), (16, 1 << 20)])
@pytest.mark.parametrize("limit_mib", [99, 100, 100.1, 101, 150, 1000])
def test_the_largest_that_fits_is_found(kind, step, most, limit_mib):
    """As one would who tries them all."""
    peak, limit, tries = PEAKS[kind], int(limit_mib * MIB), 0

    def counted(n: int) -> int:
        nonlocal tries
        tries += 1
        return peak(n)

    numbers = [*range(step, most, step), most]
    expected = max((n for n in numbers if peak(n) <= limit), default=None)
    assert largest(counted, limit, step=step, most=most) == expected
    assert tries <= 2 * (most // step).bit_length()


def fewest(words: str, limit_mib: float, above: int = 0) -> int | None:
    point = plan_point(composed("model=tiny", "world_size=2", *words.split()), None, "cpu")
    point.config.cluster.device_memory_gib = limit_mib / 1024
    found = first_that_fits(more_ranks(point.config, "cpu", above=above), point)
    return found and found.planned.config.world_size


def states_mib(world_size: int, kind: str | None = None) -> float:
    config = with_world(composed("model=tiny", "strategy=zero3", "world_size=1"), world_size)
    outcome = plan_point(config, None, "cpu").outcome
    return (outcome.by_kind[kind] if kind else outcome.total).fullest / MIB


def test_the_fewest_ranks_are_those_half_of_which_do_not_fit():
    assert fewest("strategy=zero3", 1024) == 1
    assert fewest("strategy=zero3", 1024, above=2) == 4
    for size in (2, 4):
        held = states_mib(size)
        assert held < states_mib(size // 2)
        assert fewest("strategy=zero3", held) == size
    # No number of ranks makes what every rank holds whole smaller.
    assert fewest("strategy=ddp", 1) is None
    assert MOST_RANKS["cpu"] < MOST_RANKS["cuda"]


def test_one_rank_lays_out_nothing_for_others():
    assert states_mib(1, "buffers") == 0 < states_mib(2, "buffers")
