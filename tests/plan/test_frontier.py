"""The frontier: of points that do the same work, those that no other beats in memory and time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.composing import composed
from zeroexp.plan.frontier import Dot, Work, frontier
from zeroexp.plan.outcome import RankPeak, RehearsedPeaks, plan_point

GIB = 2**30


def dot(name: str, seconds: float, gib: int, ranks: int = 8, **more: Any) -> Dot:
    config = composed("model=mlp_tiny", "data=vectors", "world_size=2", "cluster.device=cpu")
    outcome = replace(plan_point(config, None, "cpu", name).outcome, memory_gib=5.0)
    peak = RankPeak(0, "backward", gib * GIB, {}, {}, [])
    rehearsed = RehearsedPeaks([peak], "cpu", (2,), (seconds, seconds, seconds))
    return Dot(outcome, rehearsed, Work("mlp_tiny", ranks, 16, 16, "")._replace(**more))


def test_a_point_is_beaten_by_one_that_is_as_fast_and_holds_less():
    dots = [
        dot("slow-small", 3.0, 1),
        dot("fast-large", 1.0, 4),
        dot("as-fast-larger", 1.0, 6),
        dot("middle", 2.0, 2),
        dot("slower-larger", 2.5, 3),
        dot("other-work", 9.0, 9, ranks=4),
        dot("longer", 9.0, 9, seq_len=32),
        dot("of-another-shape", 9.0, 9, shape="of two layers"),
    ]
    best = [each.outcome.name for each in frontier(dots)]
    others = ["other-work", "of-another-shape", "longer"]
    assert sorted(best) == sorted([*others, "fast-large", "middle", "slow-small"])
