"""A transport of one's own around another: a row of TRANSPORTS is all that the engine needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.oracle import Recipe, build_on_rank, run_steps
from tests.strategies.engine import Ours
from zeroexp.comm.base import GatherPart, Pending
from zeroexp.comm.collectives import TRANSPORTS
from zeroexp.comm.direct import Direct
from zeroexp.comm.facts import Facts
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World
from zeroexp.zero.options import Options

RECIPE = Recipe(steps=2)


class Rounding(Direct):
    """What is gathered arrives in bfloat16's precision, with every rank's own section as well."""

    def __init__(self, world: World, moves: Moves):
        super().__init__(world, moves, share_memory=False)

    @property
    def facts(self) -> Facts:
        return replace(super().facts, name="rounding")

    def all_gather(
        self, parts: Sequence[GatherPart], offer: int | None, what: str
    ) -> tuple[Pending, int]:
        gathered, num_bytes = super().all_gather(parts, offer, what)

        def round_all() -> None:
            for part in parts:
                part.full.copy_(part.full.bfloat16())

        return Pending([gathered], round_all), num_bytes


def rest_and_shown(world: World) -> tuple[str, list[Tensor], list[Tensor], list[Tensor]]:
    """The transport's name; this rank's pieces, before and after reading and keeping them; what it is shown."""
    TRANSPORTS["rounding"] = Rounding
    try:
        strategy: Any = build_on_rank(world, RECIPE, Ours("zero3", Options(transport="rounding")))
    finally:
        del TRANSPORTS["rounding"]
    run_steps(strategy, world, RECIPE, range(RECIPE.steps))
    chunks = [tensors for unit in strategy.units for tensors in unit.held]
    before = [tensors.piece.clone() for tensors in chunks]
    with strategy.gathered():
        shown = [parameter.detach().clone() for parameter in strategy.model.parameters()]
    with strategy.gathered(write=True):
        pass
    return strategy.settings["transport"], before, [t.piece.clone() for t in chunks], shown


def test_a_codec_rounds_what_others_see_and_never_the_weights_themselves(ranks):
    (one, before, after, shown), (other, *others, seen_there) = ranks(rest_and_shown)
    assert one == other == "rounding"
    for now, then in ((before, after), others):
        assert all(torch.equal(*pair) for pair in zip(now, then, strict=True))
    assert any(not torch.equal(piece, piece.bfloat16().float()) for piece in before)
    pairs = list(zip(shown, seen_there, strict=True))
    assert all(torch.equal(here.bfloat16(), there.bfloat16()) for here, there in pairs)
    assert any(not torch.equal(*pair) for pair in pairs)
