"""Training with codecs, beside an engine without them whose transport rounds by hand what travels, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.comm.test_collectives import chunks_of, gradients_of
from tests.crossed import every_nth
from tests.oracle import (
    Outcome,
    Recipe,
    build_on_rank,
    outcome_of,
    pieces_of,
    run_steps,
    train_oracle,
)
from tests.strategies.engine import Ours
from zeroexp.comm.base import GatherPart, Pending, ReducePart, spans_of
from zeroexp.comm.codec import decode, encode
from zeroexp.comm.collectives import TRANSPORTS, Collectives
from zeroexp.comm.direct import Direct
from zeroexp.comm.traits import MoveOptions
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.canonical import merge
from zeroexp.process import world as worlds
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World
from zeroexp.zero.options import Dtypes, Options

NUM_REDUCTIONS = 100
# stage, layout, codecs of gathers and of reductions, error feedback, precision, groups of ranks, ranks
CASES = [
    ("zero3", "buffer", "int8", "int4", True, "fp32", 1, 2),
    ("zero3", "tensor", "int4", None, False, "bf16_master", 1, 3),
    ("zero3", "parameter", "float8", "int8", False, "fp32", 1, 3),
    ("zero2", "buffer", None, "int4", True, "bf16_master", 1, 3),
    ("zero2", "parameter", None, "float8", False, "fp32", 1, 2),
    ("zero1", "tensor", None, "int8", True, "fp32", 1, 3),
    ("zero1", "parameter", None, "int4", False, "bf16_master", 1, 2),
    ("zero3", "buffer", "int8", "int4", False, "fp32", 2, 4),
]


class RoundingByHand(Direct):
    """Messages whose gathers arrive rounded everywhere, and whose reductions round what goes to other ranks."""

    def __init__(
        self, world: World, moves: Moves, gather: str | None, reduce: str | None, feedback: bool
    ):
        super().__init__(world, moves, share_memory=False)
        self._gather, self._reduce = gather, reduce
        # What rounding left out of the elements of a unit that go to a peer.
        self._left_out: dict[tuple[str, int], Tensor] | None = {} if feedback else None

    def all_gather(
        self, parts: Sequence[GatherPart], exposure: int | None, what: str
    ) -> tuple[Pending, int]:
        gathered, num_bytes = super().all_gather(parts, exposure, what)

        def round_sections() -> None:
            for part in parts:
                part.full[part.chunk.unpadded_numel :] = 0.0  # a piece's padding is zero
            for rank in self._ranks:
                _round(self._gather, [part.full[part.chunk.section(rank)] for part in parts])

        return Pending([gathered], round_sections), num_bytes

    def reduce_scatter(self, parts: Sequence[ReducePart], what: str) -> tuple[Pending, int]:
        for peer in self._peers:
            spans = spans_of(parts, peer)
            if self._left_out is not None and spans:
                self._feed_back(spans, self._left_out, (what, peer))
            else:
                _round(self._reduce, spans)
        return super().reduce_scatter(parts, what)

    def _feed_back(self, spans: list[Tensor], left_out: dict[Any, Tensor], key: Any) -> None:
        """Round the sum of the spans and of what was left out before, in float32."""
        exact = torch.cat([span.float() for span in spans]) + left_out.get(key, 0.0)
        sizes = [len(span) for span in spans]
        rounded = list(exact.clone().split(sizes))
        _round(self._reduce, rounded)
        left_out[key] = exact - torch.cat(rounded)
        torch._foreach_copy_(spans, rounded)

    def all_reduce(self, parts: Sequence[ReducePart], what: str):
        """Sums between replicas are exact."""
        self._reduce = None
        return super().all_reduce(parts, what)


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


def train_three_ways(world: World, stage, layout, gather, reduce, feedback, precision, replicas):
    """With codecs over messages and over the backend, and by hand."""
    recipe = Recipe(precision=precision, world_size=world.size, steps=2)
    exact = Options(layout=layout, transport="gloo", replicas=replicas)
    coded = replace(exact, gather_codec=gather, reduce_codec=reduce, error_feedback=feedback)
    TRANSPORTS["by_hand"] = partial(RoundingByHand, gather=gather, reduce=reduce, feedback=feedback)
    try:
        ways = [coded, replace(coded, transport="native"), replace(exact, transport="by_hand")]
        return [train(world, stage, recipe, options) for options in ways]
    finally:
        del TRANSPORTS["by_hand"]


@every_nth(2, "case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_codecs_round_what_travels_and_nothing_else(ranks, case):
    *words, world_size = case
    answers = ranks(train_three_ways, *words, world_size=world_size)
    coded, native, by_hand = (outcome_of([ways[index] for ways in answers]) for index in range(3))
    for other in (native, by_hand):
        assert_equal(coded, other)
    # Exactly; it differs from the second step on, if reductions alone are rounded.
    exact = train_oracle(Recipe(precision=case[5], world_size=world_size, steps=2))
    assert coded.losses[1] != pytest.approx(exact.losses[1], rel=1e-5)


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


def sums_of_the_same_gradients(world: World) -> tuple[float, float, int]:
    """How far the sum of many reductions of one gradient is off, with error feedback and without."""
    wires = {
        feedback: Collectives(
            world, MoveOptions(transport="gloo", reduce_codec="int4", error_feedback=feedback)
        )
        for feedback in (True, False)
    }
    chunk = chunks_of("one-padded-buffer", world.size)[0]
    found: dict[bool, float] = {}
    for feedback, wire in wires.items():
        wire.connect()
        residuals = wire.new_error_feedback([chunk])
        outs = [torch.zeros(span.numel) for span in chunk.spans(world.rank)]
        exact = [torch.zeros_like(out) for out in outs]
        for _ in range(NUM_REDUCTIONS):
            part = ReducePart(chunk, gradients_of(chunk, 1, torch.float32), outs, accumulate=True)
            terms = [part.gradients[s.member][s.start : s.stop] for s in chunk.spans(world.rank)]
            for total, term in zip(exact, terms, strict=True):
                total.add_(term, alpha=world.size)
            wire.reduce_scatter([part], "reduce", residuals=residuals).wait()
        found[feedback] = max(float((o - e).abs().max()) for o, e in zip(outs, exact, strict=True))
    kept = sum(r.nbytes for r in (wires[True].new_error_feedback([chunk]) or {}).values())
    return (
        found[True],
        found[False],
        kept - 4 * (chunk.unpadded_numel - chunk.real_numel(world.rank)),
    )


def test_in_the_long_run_error_feedback_leaves_nothing_out(ranks):
    """Sums are off by what is left out once, at most half a step of int4 a peer, and without it by that each time."""
    for fed_back, plain, more_bytes in ranks(sums_of_the_same_gradients, world_size=2):
        assert fed_back <= 1.0 < 20 * fed_back < plain
        assert more_bytes == 0


class SumOfWeights(torch.nn.Module):
    """Gradients are what multiplies the weights, whatever these are."""

    def __init__(self):
        super().__init__()
        self.always, self.seldom = (torch.nn.Parameter(torch.zeros(300)) for _ in range(2))

    def forward(self, factors: Tensor, is_used: bool) -> Tensor:
        loss = (self.always * factors).sum()
        return loss + (self.seldom * factors).sum() if is_used else loss


def seldom_used(world: World, stage: str, layout: str, reduce_each: str) -> float:
    """How far a weight is off after steps of plain SGD of which every other one has no gradient of it on any rank."""
    model, factors = SumOfWeights(), torch.linspace(-1, 1, 300)
    strategy = Sharded(
        model,
        blocks=[],
        stage=STAGES[stage],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=1.0),
        max_grad_norm=None,
        world=world,
        options=Options(layout, reduce_each=reduce_each, reduce_codec="int4", error_feedback=True),
    )
    for step in range(40):
        with strategy.microbatch(last=True):
            strategy.backward(strategy.model(factors, step % 2 == 0))
        strategy.step()
        strategy.zero_grad()
    with strategy.gathered():
        return float((model.seldom.detach() + 20 * world.size * factors).abs().max())


@pytest.mark.parametrize(
    "way",
    [
        ("zero1", "tensor", "step"),
        ("zero2", "parameter", "microbatch"),
        ("zero3", "buffer", "microbatch"),
    ],
)
def test_what_is_left_out_waits_where_no_rank_has_a_gradient(ranks, way):
    """One peer's terms, at most 1 and half a step of 1/7 each, are off by half a step once, not in each of 20 steps."""
    for off in ranks(seldom_used, *way, world_size=2):
        assert off <= (1 + 1 / 13) / 14


def fed_back_after_a_load(world: World) -> list[float]:
    """The norm of a step after a load, of the engine that saved and has taken a step since, and of a new one."""
    recipe = Recipe(world_size=world.size)
    options = Options(reduce_codec="int4", error_feedback=True, transport="gloo")
    old, new = (build_on_rank(world, recipe, Ours("zero3", options)) for _ in range(2))
    run_steps(old, world, recipe, range(1))
    saved = merge(worlds.gather_objects(pieces_of(old)))
    run_steps(old, world, recipe, range(1, 2))
    norms: list[float] = []
    for strategy in (old, new):
        strategy.load_state_dict(saved)
        norms += run_steps(strategy, world, recipe, range(1, 2)).norms
    return norms


def test_a_load_forgets_what_was_left_out(ranks):
    for of_old, of_new in ranks(fed_back_after_a_load):
        assert of_old == of_new


def norms_after_a_discarded_step(world: World, stage: str, way: str) -> dict[bool, list[float]]:
    """Norms with error feedback and without, of steps one of which is thrown away."""
    norms: dict[bool, list[float]] = {}
    scales = way == "overflow"
    for feedback in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        strategy = Sharded(
            model,
            blocks=[],
            stage=STAGES[stage],
            param_groups=[{"params": list(model.parameters())}],
            optimizer_factory=partial(torch.optim.SGD, lr=0.01),
            dtypes=Dtypes(torch.float16, torch.float32, torch.float32) if scales else None,
            scales_loss=scales,
            world=world,
            options=Options(reduce_codec="int8", error_feedback=feedback),
        )
        inputs = torch.ones(2, 16, dtype=torch.float16 if scales else torch.float32)
        norms[feedback] = []
        for step in range(8):
            with strategy.microbatch(last=True):
                factor = 1e6 if step == 4 else 1.0
                loss = strategy.model(inputs).float().square().sum() / world.size
                strategy.backward(loss * factor)
            if step == 4 and way == "zero_grad":
                strategy.zero_grad()
                continue
            norms[feedback].append(strategy.step().item())
            strategy.zero_grad()
    return norms


@pytest.mark.parametrize(("stage", "way"), [("zero2", "overflow"), ("zero3", "zero_grad")])
def test_nothing_is_fed_back_of_gradients_that_were_thrown_away(ranks, stage, way):
    """By the loss scale, whose step is left out, or by the program."""
    for norms in ranks(norms_after_a_discarded_step, stage, way):
        assert sum(map(isfinite, norms[True])) > 4
        assert norms[True] == pytest.approx(norms[False], rel=0.01, nan_ok=True)
