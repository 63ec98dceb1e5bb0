"""Memory against time: the planned points that no other point of the same work beats in both.

    peak
     | x            x: beaten by a point that is as fast and holds less
     |  o
     |    o   x     o: on the frontier
     |        o
     +----------- ms of a step

Each point is rehearsed at its own world size and batch. Only points of one model, world size, global batch and sequence
length do the same work in a step, so only these are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeroexp.plan.outcome import Outcome, RehearsedPeaks
from zeroexp.plan.plan_points import Planned, rehearse_planned


class Work(NamedTuple):
    """What a step trains; a model's name does not tell all of its shape."""

    model: str
    world_size: int
    global_batch_size: int
    seq_len: int
    shape: str


@dataclass(frozen=True)
class Dot:
    """One rehearsed point."""

    outcome: Outcome
    rehearsed: RehearsedPeaks
    work: Work

    @property
    def peak_bytes(self) -> int:
        return self.rehearsed.fullest.num_bytes

    @property
    def seconds(self) -> float:
        return self.rehearsed.step_seconds[1]


def dots_of(planned: Sequence[Planned]) -> tuple[list[Dot], list[str]]:
    """Rehearse every point that has no rehearsal yet; return them, and why others have none."""
    dots: list[Dot] = []
    reasons: dict[str, None] = {}
    for each in planned:
        if each.outcome is None:
            continue
        outcome = each.outcome
        if outcome.rehearsed is None and outcome.not_rehearsed is None:
            print(f"{outcome.name}: rehearsing", file=sys.stderr, flush=True)
            outcome = rehearse_planned(each)
        if outcome.rehearsed is None:
            reasons[str(outcome.not_rehearsed)] = None
            continue
        config = each.point.config
        data, size = config.data, outcome.world_size
        work = Work(
            outcome.model, size, data.global_batch_size, data.seq_len, shape=repr(config.model)
        )
        dots.append(Dot(outcome, outcome.rehearsed, work))
    return dots, list(reasons)


def frontier(dots: Sequence[Dot]) -> list[Dot]:
    """Return the dots that no other beats: for each work by time, each holding less than those before it."""
    best: list[Dot] = []
    for dot in sorted(dots, key=lambda dot: (dot.work, dot.seconds, dot.peak_bytes)):
        if not best or best[-1].work != dot.work or dot.peak_bytes < best[-1].peak_bytes:
            best.append(dot)
    return best
