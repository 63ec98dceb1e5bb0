"""Changes of a point: the fewest ranks at which its peak fits, the largest number whose peak does, other stages."""

from __future__ import annotations

import pytest

from tests.composing import composed
from zeroexp.config.keys import ConfigError, resolve
from zeroexp.plan.changes import MICRO, planned_change, with_settings
from zeroexp.plan.fit import fewest_ranks, largest
from zeroexp.plan.outcome import PlannedPoint, plan_point
from zeroexp.plan.peak import with_rehearsal

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


def rehearsed_at(world_size: int, stage: str) -> PlannedPoint:
    words = ("model=mlp_tiny", "data=vectors", "data.seq_len=16", f"strategy={stage}")
    config = with_settings(composed(*words, "world_size=1"), {"world_size": world_size})
    return with_rehearsal(plan_point(config, None, "cpu"))


@pytest.mark.slow
def test_the_fewest_ranks_are_those_half_of_which_do_not_fit():
    """And no number of ranks makes smaller what every rank holds whole."""
    half, point = (rehearsed_at(size, "zero3") for size in (2, 4))
    held, more = (each.outcome.peak_bytes for each in (point, half))
    assert held < more
    for stage, limit, size in (("zero3", held, 4), ("zero3", more, 2), ("ddp", more // 4, None)):
        start = rehearsed_at(1, stage)
        start.config.cluster.device_memory_gib = limit / 2**30
        found = fewest_ranks(start)
        assert (found and found.config.world_size) == size


def test_ranks_in_groups_of_three_are_multiples_of_three():
    words = ("model=mlp_tiny", "data=vectors", "data.seq_len=16", "world_size=9")
    groups = ("strategy=zero2", "strategy.replicas=3", "cluster.device_memory_gib=1")
    found = fewest_ranks(plan_point(composed(*words, *groups), None, "cpu"))
    assert found and found.config.world_size == 6, "3 would be groups of one rank"


def test_ranks_on_three_nodes_are_multiples_of_three():
    words = ("model=mlp_tiny", "data=vectors", "data.seq_len=16", "strategy=zero3", "world_size=9")
    link = ("cluster.link=1gbit", "cluster.nodes=3", "cluster.device_memory_gib=1")
    found = fewest_ranks(plan_point(composed(*words, *link), None, "cpu"))
    assert found and found.config.world_size == 3


def test_one_rank_lays_out_nothing_for_others():
    alone, two = (rehearsed_at(size, "zero3").outcome.by_kind["buffers"] for size in (1, 2))
    assert alone.fullest == 0 < two.fullest


@pytest.mark.parametrize(
    ("named", "stages"),
    [((), ["ddp", "zero1", "zero2", "zero3"]), (("strategy.keep=all",), ["zero3"])],
)
def test_what_the_line_names_stays_and_what_it_leaves_open_follows_the_stage(named, stages):
    """A stage under which a word has no meaning is none to compare; defaults are those of each stage."""
    words = ("model=mlp_tiny", "data=vectors", "world_size=2")
    point = plan_point(composed(*words, "strategy=zero3", *named), None, "cpu")
    keys = [word.partition("=")[0] for word in named]
    for stage in ("ddp", "zero1", "zero2", "zero3"):
        if stage not in stages:
            with pytest.raises(ConfigError, match=r"strategy\.keep"):
                planned_change(point, {"strategy": stage}, keys)
            continue
        found = planned_change(point, {"strategy": stage}, keys)
        again = composed(*words, found.outcome.name, *named)
        assert found.config == resolve(again)


def test_a_stage_of_a_name_of_ones_own_stays():
    """What a YAML of one's own calls its strategy is no stage to change to, and is the line's own."""
    config = composed(
        "model=mlp_tiny", "strategy=zero3", "strategy.name=mine", "strategy.unit=layer"
    )
    found = with_settings(config, {"strategy": "mine", MICRO: 1})
    assert found.strategy == resolve(config).strategy
