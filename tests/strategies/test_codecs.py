"""Training with codecs, beside an engine without them whose transport rounds by hand what travels, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.composing import composed
from tests.oracle import Outcome, Recipe, build_on_rank, outcome_of, pieces_of, run_steps
from tests.strategies.engine import Ours
from zeroexp.check import check
from zeroexp.comm.base import Between, GatherPart, Pending, ReducePart
from zeroexp.comm.codec import decode, encode
from zeroexp.comm.collectives import TRANSPORTS
from zeroexp.comm.direct import Direct
from zeroexp.config.keys import UndefinedCombination
from zeroexp.interface.canonical import merge
from zeroexp.process import world as worlds
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World
from zeroexp.zero.options import Options

# stage, layout, codecs of gathers and of reductions, precision, groups of ranks, ranks
CASES = [
    ("zero3", "buffer", "int8", "int4", "fp32", 1, 2),
    ("zero3", "tensor", "int4", None, "bf16_master", 1, 3),
    ("zero3", "parameter", "float8", "int8", "fp32", 1, 3),
    ("zero2", "buffer", None, "int4", "bf16_master", 1, 3),
    ("zero2", "parameter", None, "float8", "fp32", 1, 2),
    ("zero1", "tensor", None, "int8", "fp32", 1, 3),
    ("zero1", "parameter", None, "int4", "bf16_master", 1, 2),
    ("zero3", "buffer", "int8", "int4", "fp32", 2, 4),
]


class RoundingByHand(Direct):
    """Messages whose gathers arrive rounded everywhere, and whose reductions round what goes to other ranks."""

    def __init__(self, world: World, moves: Moves, gather: str | None, reduce: str | None):
        super().__init__(world, moves, share_memory=False)
        self._gather, self._reduce = gather, reduce

    def all_gather(
        self, parts: Sequence[GatherPart], offer: int | None, what: str
    ) -> tuple[Pending, int]:
        gathered, num_bytes = super().all_gather(parts, offer, what)

        def round_sections() -> None:
            for part in parts:
                part.full[part.chunk.unpadded_numel :] = 0.0  # a piece's padding is zero
            for rank in self._ranks:
                _round(self._gather, [part.full[part.chunk.section(rank)] for part in parts])

        return Pending([gathered], round_sections), num_bytes

    def reduce_scatter(self, parts: Sequence[ReducePart], what: str) -> tuple[Pending, int]:
        for peer in self._peers:
            _round(self._reduce, self._spans(parts, peer))
        return super().reduce_scatter(parts, what)

    def all_reduce(self, parts: Sequence[ReducePart], what: str, between: Between | None = None):
        """Sums between replicas are exact."""
        self._reduce = None
        return super().all_reduce(parts, what, between)


def _round(codec: str | None, tensors: Sequence[Tensor]) -> None:
    """Replace the tensors by what the codes of all of them, side by side, stand for."""
    if codec is None or not tensors:
        return
    values = torch.cat([*tensors])
    rounded = decode(codec, encode(codec, values)[None], len(values), values.dtype)[0]
    torch._foreach_copy_([*tensors], list(rounded.split([len(each) for each in tensors])))


def train(world: World, stage: str, recipe: Recipe, options: Options):
    strategy = build_on_rank(world, recipe, Ours(stage, options))
    return run_steps(strategy, world, recipe, range(recipe.steps)), pieces_of(strategy)


def train_four_ways(world: World, stage, layout, gather, reduce, precision, replicas):
    """With codecs over messages and over the backend, by hand, and exactly."""
    recipe = Recipe(precision=precision, world_size=world.size)
    exact = Options(layout=layout, transport="gloo", replicas=replicas)
    coded = replace(exact, gather_codec=gather, reduce_codec=reduce)
    TRANSPORTS["by_hand"] = partial(RoundingByHand, gather=gather, reduce=reduce)
    try:
        ways = [
            coded,
            replace(coded, transport="native"),
            replace(exact, transport="by_hand"),
            exact,
        ]
        return [train(world, stage, recipe, options) for options in ways]
    finally:
        del TRANSPORTS["by_hand"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_codecs_round_what_travels_and_nothing_else(ranks, case):
    *words, world_size = case
    answers = ranks(train_four_ways, *words, world_size=world_size)
    coded, native, by_hand, exact = (
        outcome_of([ways[index] for ways in answers]) for index in range(4)
    )
    for other in (native, by_hand):
        assert_equal(coded, other)
    assert coded.losses != exact.losses  # from the second step on, if reductions alone are rounded


def assert_equal(one: Outcome, other: Outcome) -> None:
    assert (one.losses, one.norms) == (other.losses, other.norms)
    for name, tensors in one.state.items():
        for key, tensor in tensors.items():
            assert torch.equal(tensor, other.state[name][key]), f"{name}.{key}"


def shown_and_kept(world: World):
    """Whole weights inside of `gathered`, and what is saved, loaded by an engine without codecs and saved again."""
    recipe = Recipe(world_size=world.size)
    coded: Any = build_on_rank(
        world, recipe, Ours("zero3", Options(gather_codec="int4", reduce_codec="int4"))
    )
    run_steps(coded, world, recipe, range(2))
    with coded.gathered():
        shown = {name: p.detach().clone() for name, p in coded.model.named_parameters()}
    exact: Any = build_on_rank(world, recipe, Ours("zero2", Options()))
    exact.load_state_dict(merge(worlds.gather_objects(pieces_of(coded))))
    with exact.gathered():
        loaded = {name: p.detach().clone() for name, p in exact.model.named_parameters()}
    return shown, loaded, coded.settings["transport"]


def test_weights_are_shown_and_saved_exactly(ranks):
    (shown, loaded, transport), (seen_there, _, _) = ranks(shown_and_kept)
    assert transport == "gloo"  # codes are sent, also where ranks share memory
    assert shown.keys() == loaded.keys()
    for name, weight in shown.items():
        assert torch.equal(weight, loaded[name]) and torch.equal(weight, seen_there[name]), name


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("strategy=zero2 strategy.gather_codec=int8", "strategy=zero2 never gathers parameters"),
        ("strategy=ddp strategy.reduce_codec=int8", "strategy=ddp all-reduces gradients"),
    ],
)
def test_a_codec_without_effect_is_refused(words, line):
    with pytest.raises(UndefinedCombination, match=line):
        check(composed("world_size=2", *words.split()))


def refused(world: World) -> list[str]:
    lines: list[str] = []
    wrong: list[tuple[str, Options]] = [
        ("zero2", Options(gather_codec="int8")),
        ("zero1_allreduce", Options(reduce_codec="int4")),
        ("zero3", Options(reduce_codec="int3")),
        ("zero3", Options(reduce_codec="int4", transport="direct")),
    ]
    for stage, options in wrong:
        with pytest.raises(ValueError) as raised:
            build_on_rank(world, Recipe(), Ours(stage, options))
        lines.append(str(raised.value))
    return lines


def test_the_library_refuses_in_one_line(ranks):
    one, _ = ranks(refused)
    ends = ("use zero3", "use zero1, zero2 or zero3", "use int8, float8, int4, None", "use auto")
    assert [line.endswith(end) for line, end in zip(one, ends, strict=True)] == [True] * 4, one
