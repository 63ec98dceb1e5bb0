"""With options.publish="forward" updated weights arrive when something uses them: never too late, and for anybody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.crossed import crossed, every_nth
from tests.models_for_tests import MODELS, microbatch_of
from tests.oracle import (
    Recipe,
    Rules,
    assert_same,
    build_on_rank,
    outcome_of,
    train_on_ranks,
    train_oracle,
)
from tests.strategies.engine import Ours
from zeroexp.cut.layout import LAYOUTS
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.strategy import Strategy
from zeroexp.process.world import World, barrier, fake_world
from zeroexp.zero.engine import Engine
from zeroexp.zero.held import GatherState
from zeroexp.zero.options import Options

PUBLISHED = ("zero1_allreduce", "zero1", "zero2")
TRANSPORTS = ("direct", "gloo", "native")
# Behind the first two steps the bits of all weights are compared, for which they arrive.
RECIPE = Recipe(steps=5)


def in_forward(
    stage: str, transport: str = "native", layout: str = "tensor", **options: Any
) -> Ours:
    return Ours(stage, Options(layout, transport=transport, publish="forward", **options))


@crossed(
    "stage, transport, layout",
    PUBLISHED,
    TRANSPORTS,
    LAYOUTS,
    quick=lambda stage, transport, layout: (
        PUBLISHED.index(stage) + TRANSPORTS.index(transport) == list(LAYOUTS).index(layout)
    ),
)
@every_nth(2, "model", ["toy", "moe_by_turns"])
def test_it_trains_the_same_model(ranks, stage, transport, layout, model):
    recipe = replace(RECIPE, model=model, precision="bf16_master" if model == "toy" else "fp32")
    make = in_forward(stage, transport, layout)
    answers = ranks(train_on_ranks, recipe, make)
    assert_same(outcome_of(answers), train_oracle(recipe))


def test_it_trains_the_same_model_unobserved(ranks):
    make = Ours("zero2", Options(transport="gloo", publish="forward"), kind=Engine)
    assert_same(outcome_of(ranks(train_on_ranks, RECIPE, make)), train_oracle(RECIPE))


def test_it_trains_the_same_model_in_replicas(ranks):
    recipe = replace(RECIPE, world_size=4)
    make = in_forward("zero1", "gloo", replicas=2)
    outcome = outcome_of(ranks(train_on_ranks, recipe, make, world_size=4))
    assert_same(outcome, train_oracle(recipe, Rules(replicas=2)))


# -- who reads between two steps --------------------------------------------------------------------


def steps(strategy: Strategy, world: World, numbers: Sequence[int] = (0, 1, 2)) -> None:
    for number in numbers:
        step(strategy, world, number)


def step(strategy: Strategy, world: World, number: int = 0) -> None:
    with strategy.microbatch(last=True):
        out = strategy.model(microbatch_of(number, 0, world.rank)[0])
        strategy.backward(out.float().square().sum())
    strategy.step()
    strategy.zero_grad()


def whole_weights(strategy: Strategy) -> dict[str, Tensor]:
    with strategy.gathered():
        return {name: p.detach().clone() for name, p in strategy.model.named_parameters()}


WAYS = (
    *("parameters", "foreach", "model.state_dict"),
    *("gathered", "gathered, unobserved", "one rank alone"),
)


def read_by(world: World, stage: str, transport: str, way: str) -> bool:
    """Read the weights right behind a step; tell whether they are those that have arrived.

    Over the backend's collectives a unit of several parts is unpacked when it is waited for, and never before.
    """
    kind = Engine if way == "gathered, unobserved" else Sharded
    strategy = build_on_rank(world, Recipe(), replace(in_forward(stage, transport), kind=kind))
    steps(strategy, world)
    read: dict[str, Tensor] = {}
    if way == "parameters":
        read = {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
    elif way == "foreach":
        named = dict(strategy.model.named_parameters())
        read = dict(zip(named, torch._foreach_mul(list(named.values()), 1.0), strict=True))
    elif way == "model.state_dict":
        read = {name: value.clone() for name, value in strategy.model.state_dict().items()}
    elif way.startswith("gathered"):
        read = whole_weights(strategy)
    elif way == "one rank alone":
        if world.rank:
            strategy.state_dict()
            strategy.model_states()
            strategy.drain()
        barrier()
    strategy.drain()
    weights = whole_weights(strategy)
    return all(torch.equal(read[name], weights[name]) for name in weights if read)


@crossed("way, transport", WAYS, TRANSPORTS, quick=lambda way, transport: transport == "native")
def test_who_reads_weights_waits_for_them(ranks, way, transport):
    assert all(ranks(read_by, "zero1", transport, way))


def written_between(world: World) -> dict[str, Tensor]:
    strategy = build_on_rank(world, Recipe(), in_forward("zero2"))
    steps(strategy, world)
    with strategy.gathered(write=True), torch.no_grad():
        for parameter in strategy.model.parameters():
            parameter.fill_(0.25)
    found = whole_weights(strategy)
    step(strategy, world)
    return found


def test_weights_may_be_written_between_two_steps(ranks):
    for found in ranks(written_between):
        assert {float(each.min()) for each in found.values()} == {0.25}
        assert {float(each.max()) for each in found.values()} == {0.25}


def go_on_behind_an_exception(world: World) -> bool:
    """A microbatch that fails in its forward, on all ranks, leaves weights on their way; the next ones train on."""
    strategy = build_on_rank(world, Recipe(), in_forward("zero1"))
    plain = build_on_rank(world, Recipe(), Ours("zero1", Options()))
    for each in (strategy, plain):
        steps(each, world)

    def fail(*_: object) -> None:
        raise ArithmeticError

    block = strategy.model.get_submodule("blocks.1")
    hook = block.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError), strategy.microbatch(last=True):
        strategy.model(microbatch_of(1, 0, world.rank)[0])
    hook.remove()
    read = {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
    before = whole_weights(plain)
    for each in (strategy, plain):
        step(each, world, 3)
    after, expected = whole_weights(strategy), whole_weights(plain)
    assert all(torch.equal(read[name], before[name]) for name in before)
    return all(torch.equal(after[name], expected[name]) for name in expected)


def test_an_exception_in_forward_loses_no_weights(ranks):
    assert all(ranks(go_on_behind_an_exception))


def classes_behind_a_forward(world: World) -> set[type]:
    strategy = build_on_rank(world, Recipe(), in_forward("zero1"))
    steps(strategy, world)
    with torch.no_grad():
        strategy.model(microbatch_of(0, 0, 0)[0])
    return {type(parameter) for parameter in strategy.model.parameters()}


def test_what_has_arrived_is_guarded_no_more(ranks):
    """Each use of a guarded parameter costs some microseconds."""
    assert ranks(classes_behind_a_forward) == [{nn.Parameter}] * 2


# -- what it is for ---------------------------------------------------------------------------------


def on_their_way(strategy: Sharded) -> set[str]:
    return {u.name for u in strategy.units if u.gather_state is GatherState.GATHERING}


@pytest.mark.parametrize("stage", PUBLISHED)
def test_a_block_begins_while_later_ones_are_on_their_way(stage):
    seen: list[set[str]] = []
    with fake_world(0, 2) as world:
        strategy = in_forward(stage, "gloo")(MODELS["toy"].build(), Recipe(), world)
        names = {unit.name for unit in strategy.units}
        for name in ("blocks.0", "blocks.1", "blocks.2"):
            block = strategy.model.get_submodule(name)
            block.register_forward_hook(lambda *_: seen.append(on_their_way(strategy)))
        step(strategy, world)
        seen.clear()
        assert on_their_way(strategy) == names
        step(strategy, world)
    assert seen[0] >= {"blocks.1", "blocks.2"}, seen
    assert seen[1] >= {"blocks.2"} and not seen[2] & {"blocks.0", "blocks.1", "blocks.2"}


def test_by_default_nothing_is_on_its_way_behind_a_step():
    with fake_world(0, 2) as world:
        strategy = Ours("zero1", Options(transport="gloo"))(MODELS["toy"].build(), Recipe(), world)
        step(strategy, world)
        assert on_their_way(strategy) == set()


def left_in_shared_memory(world: World) -> set[str]:
    strategy = build_on_rank(world, Recipe(), in_forward("zero1", "direct"))
    steps(strategy, world, range(4))
    return on_their_way(strategy)


def test_in_shared_memory_nothing_is_left_to_forward(ranks):
    """A rank copies by itself there: later it gains nothing, and may do so inside of what traces or fakes its code."""
    assert ranks(left_in_shared_memory) == [set(), set()]
