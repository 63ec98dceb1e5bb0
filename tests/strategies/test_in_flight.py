"""What is on its way when something else happens: nothing old is used, nothing that is still read changes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.crossed import crossed
from tests.models_for_tests import MODELS, Toy, microbatch_of
from tests.oracle import (
    Make,
    Outcome,
    Recipe,
    assert_same,
    build_on_rank,
    outcome_of,
    pieces_of,
    run_steps,
    train_on_ranks,
)
from tests.strategies.engine import Ours
from zeroexp.comm import native
from zeroexp.comm.base import Pending
from zeroexp.comm.collectives import Collectives
from zeroexp.cut.bucket import Bucket
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.canonical import canonical_of_one_rank, merge
from zeroexp.interface.strategy import CanonicalState
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World, fake_world
from zeroexp.zero.held import GatherState
from zeroexp.zero.options import Options
from zeroexp.zero.unit import Unit

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
every_stage = pytest.mark.parametrize("stage", list(STAGES))


def goes_on_in_the_same_engine(world: World, recipe: Recipe, make: Make, state: CanonicalState):
    """A step of its own, of which the next step's gathers may be left under way; then the state of somebody else."""
    strategy = build_on_rank(world, recipe, make)
    with strategy.microbatch(last=True):
        strategy.backward(strategy.model(microbatch_of(7, 0, world.rank)[0]).square().sum())
    strategy.step()
    strategy.zero_grad()
    strategy.load_state_dict(state)
    outcome = run_steps(strategy, world, recipe, range(2, recipe.steps))
    return outcome, pieces_of(strategy)


@crossed(
    "transport, stage",
    ["gloo", "direct"],
    STAGES,
    # Of weights that are published, and of those that are gathered ahead.
    quick=lambda transport, stage: (transport, stage) in (("gloo", "zero1"), ("direct", "zero3")),
)
def test_a_state_taken_up_by_an_engine_that_has_trained(ranks, stage, transport):
    """What it gathered ahead or published is of the old weights."""
    recipe, make = Recipe(), Ours(stage, Options(prefetch=2, transport=transport))
    whole = outcome_of(ranks(train_on_ranks, recipe, make))
    saved = [state for _, state in ranks(train_on_ranks, replace(recipe, steps=2), make)]
    last = outcome_of(ranks(goes_on_in_the_same_engine, recipe, make, merge(saved)))
    assert_same(last, Outcome(whole.losses[2:], whole.norms[2:], whole.state))


def optimized(strategy: Sharded) -> list[Tensor]:
    """What the optimizer updates, as bits: the sums of ranks that do not exist are no numbers."""
    groups = strategy.optimizer.param_groups
    return [weight.detach().view(torch.int32) for group in groups for weight in group["params"]]


@every_stage
def test_peers_have_read_before_weights_change(stage, monkeypatch):
    """`quiesce` waits for them: it comes once before the updates of a step, and before a state is taken up."""
    events: list[str] = []
    seen: list[bool] = []

    def quiesce(_wire: Collectives) -> None:
        events.append("quiesce")
        seen.append(all(map(torch.equal, optimized(strategy), before)))

    monkeypatch.setattr(Collectives, "quiesce", quiesce)
    with fake_world(0, 2) as world:
        make = Ours(stage, Options(transport="gloo"))
        strategy = make(MODELS["toy"].build(), Recipe(), world)
        strategy.optimizer.register_step_pre_hook(lambda *_: events.append("update"))
        for _ in range(2):
            before = [weight.clone() for weight in optimized(strategy)]
            with strategy.microbatch(last=True):
                strategy.backward(strategy.model(microbatch_of(0, 0, 0)[0]).square().sum())
            strategy.step()
            strategy.zero_grad()
            first, *updates = events
            assert first == "quiesce" and set(updates) == {"update"}
            events.clear()
        others = MODELS["toy"].build().module
        state = {
            name: {
                "weight": canonical_of_one_rank(p.detach() + 1),
                "exp_avg": canonical_of_one_rank(torch.zeros_like(p)),
                "exp_avg_sq": canonical_of_one_rank(torch.zeros_like(p)),
                "step": canonical_of_one_rank(torch.tensor(2.0)),
            }
            for name, p in others.named_parameters()
        }
        before = [weight.clone() for weight in optimized(strategy)]
        strategy.load_state_dict(state)
        assert events == ["quiesce"]
        assert not any(map(torch.equal, optimized(strategy), before))
    assert seen == [True] * 3, "weights are as they were when it is asked"


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_a_message_is_held_until_its_turn_is_over_and_gone_before_the_next(monkeypatch, stage):
    """As NCCL holds it, so that a rehearsal sees it beside what backward does meanwhile."""
    messages: list[weakref.ref[Tensor]] = []
    before_next: list[bool] = []
    in_backward: list[bool] = []
    scatter = native._reduce_scatter

    def noted(own: Tensor, message: Tensor, group: Any) -> Any:
        before_next.extend(each() is not None for each in messages)
        messages.append(weakref.ref(message))
        return scatter(own, message, group)

    monkeypatch.setattr(native, "_reduce_scatter", noted)
    with fake_world(0, 2) as world:
        model = Toy()
        make = Ours(stage, Options(transport="native", reduce_each="microbatch"))
        strategy = make(BuiltModel(model, BLOCKS), Recipe(), world)
        for block in model.blocks:
            block.register_full_backward_pre_hook(
                lambda *_: in_backward.extend(each() is not None for each in messages[-1:])
            )
        with strategy.microbatch(last=True):
            strategy.backward(strategy.model(microbatch_of(0, 0, 0)[0]).square().sum())
    assert len(messages) == 1 + len(BLOCKS) and not any(before_next)
    assert in_backward and all(in_backward)


# -- an exception in backward ------------------------------------------------------------------------


def raise_mine(_gradient: Tensor) -> None:
    raise ValueError("mine, in backward")


def raise_in_backward(_module: Any, _args: Any, output: Tensor) -> None:
    output.register_hook(raise_mine)


def raises_behind_the_second_block(world: World, make: Make) -> str:
    """In the third step: a reduction is on its way then, and a gather of the first block is ahead of its use."""
    model = Toy()
    strategy = make(BuiltModel(model, BLOCKS), Recipe(), world)
    try:
        for step in range(3):
            if step == 2:
                first = model.get_submodule(BLOCKS[0])
                first.register_forward_hook(raise_in_backward)
            with strategy.microbatch(last=True):
                loss = strategy.model(microbatch_of(step, 0, world.rank)[0]).square().sum()
                strategy.backward(loss)
            strategy.step()
            strategy.zero_grad()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_what_a_failed_backward_has_launched_is_kept(monkeypatch):
    """A receive that nobody holds any more is taken from gloo, and the messages behind it are lost."""
    launched: list[weakref.ref[Pending]] = []
    reduce = Unit.reduce

    def noted(unit: Unit, bucket: Bucket, *, last: bool) -> Pending:
        pending = reduce(unit, bucket, last=last)
        launched.append(weakref.ref(pending))
        return pending

    monkeypatch.setattr(Unit, "reduce", noted)
    made: list[Any] = []
    options = Options(transport="gloo", reduce_each="microbatch")

    def make(*words: Any) -> Any:
        made.append(Ours("zero3", options)(*words))
        return made[0]

    with fake_world(0, 2) as world:
        assert raises_behind_the_second_block(world, make) == "mine, in backward"
        gc.collect()
        assert launched[-1]() is not None


@pytest.mark.parametrize("codec", [None, "int8"])
def test_an_exception_in_backward_is_not_lost_in_a_wait_for_messages(ranks, codec):
    """gloo delivers no later message of a peer past one whose receive was dropped."""
    options = Options(prefetch=1, transport="gloo", reduce_each="microbatch", reduce_codec=codec)
    told = ranks(raises_behind_the_second_block, Ours("zero3", options))
    assert told == 2 * ["mine, in backward"]


# -- units in another order --------------------------------------------------------------------------


def test_another_order_of_blocks_is_learned(monkeypatch):
    """A step that runs other blocks is told by the first wrong guess; the one after it gathers ahead as it should."""
    events: list[str] = []
    gather = Collectives.all_gather

    def told(wire: Collectives, parts: Any, kind: str, *more: Any, **words: Any) -> Any:
        events.append(f"gather {parts[0].chunk.members[0].name[:8]}")
        return gather(wire, parts, kind, *more, **words)

    monkeypatch.setattr(Collectives, "all_gather", told)
    with fake_world(0, 2) as world:
        model = Toy()
        make = Ours("zero3", Options(prefetch=1, keep="none", transport="gloo"))
        strategy = make(BuiltModel(model, BLOCKS), Recipe(), world)
        for name in BLOCKS:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(lambda *_, name=name: events.append(f"run {name}"))
        steps: list[list[str]] = []
        for order in [(0, 1, 2)] * 2 + [(2, 0, 1)] * 3:  # 2 and 0 share a pool
            model.order = order
            with strategy.microbatch(last=True):
                events.clear()
                loss = strategy.model(microbatch_of(0, 0, 0)[0]).square().sum()
                steps.append([event for event in events if "blocks" in event])
                strategy.backward(loss)
            strategy.step()
            strategy.zero_grad()
    assert steps[1].index("gather blocks.1") < steps[1].index("run blocks.0")
    assert steps[-2].index("gather blocks.1") > steps[-2].index("run blocks.0")
    assert steps[-1].index("gather blocks.1") < steps[-1].index("run blocks.0")


def test_what_was_gathered_ahead_in_vain_is_freed_with_its_microbatch():
    """The last step leaves out a block that the first two have used."""
    with fake_world(0, 2) as world:
        model = Toy()
        make = Ours("zero3", Options(prefetch=1, transport="gloo"))
        strategy = make(BuiltModel(model, BLOCKS), Recipe(), world)
        for model.order in [(0, 1, 2), (0, 1, 2), (0, 2)]:
            with strategy.microbatch(last=True):
                loss = strategy.model(microbatch_of(0, 0, 0)[0]).square().sum()
                ahead = [u.name for u in strategy.units if u.gather_state is not GatherState.FREED]
                strategy.backward(loss)
            assert {unit.gather_state for unit in strategy.units} == {GatherState.FREED}
            strategy.step()
            strategy.zero_grad()
    assert "blocks.1" in ahead


def test_what_runs_between_two_steps_is_not_gathered_ahead_in_them():
    """A validation is no part of a step's order: each step after it would gather the root once more in vain."""
    with fake_world(0, 2) as world:
        make = Ours("zero3", Options(prefetch=1, transport="gloo"))
        strategy = make(MODELS["toy"].build(), Recipe(), world)
        samples, num_gathers = microbatch_of(0, 0, 0)[0], list[int]()
        for _ in range(3):
            with strategy.microbatch(last=True):
                strategy.backward(strategy.model(samples).square().sum())
            strategy.step(drain=True)
            strategy.zero_grad()
            num_gathers.append(strategy.wire.take_traffic().calls_by_kind["gather"])
            with torch.no_grad():
                strategy.model(samples)
            strategy.wire.take_traffic()
    assert num_gathers == num_gathers[:1] * 3
