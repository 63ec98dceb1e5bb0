"""The search of a plan: the fewest ranks at which model states fit, and the largest number whose peak does."""

from __future__ import annotations

import pytest

from tests.composing import composed
from zeroexp.config.keys import Config
from zeroexp.plan.changes import with_world
from zeroexp.plan.form_of_config import build_on_meta
from zeroexp.plan.outcome import plan_point
from zeroexp.plan.search import first_that_fits, largest, more_ranks, most_ranks

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


def fewest(config: Config, limit_mib: float, *, above: int = 0) -> int | None:
    config.cluster.device_memory_gib = limit_mib / 1024
    tried = more_ranks(config, "cpu", start=2 * above or 1)
    found = first_that_fits(tried, build_on_meta(config), "cpu")
    return found and found[0].config.world_size


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
