"""When moves happen: their order, ahead of use and beside compute, whatever gradients exist on whichever rank.

A wrong order is a hang (told by the pool of ranks) or wrong values (told by the oracle).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.crossed import crossed
from tests.models_for_tests import MODELS, VOCABULARY, WIDTH, TestModel, Toy, microbatch_of
from tests.oracle import (
    Recipe,
    Rules,
    assert_same,
    build_on_rank,
    outcome_of,
    pieces_of,
    run_steps,
    train_on_ranks,
    train_oracle,
)
from tests.strategies.engine import Ours
from tests.zero import test_world_of_one as world_of_one
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World, fake_world
from zeroexp.zero.held import GatherState
from zeroexp.zero.options import Options
from zeroexp.zero.unit import Unit

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


# -- models whose order is the point ---------------------------------------------------------------


class LateRoot(nn.Module):
    """The root's parameters are used after all blocks, so that its gradients come first; some by turns only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in BLOCKS)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.sometimes = nn.Parameter(torch.ones(VOCABULARY))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in BLOCKS)
        self.uses_it = True

    def forward(self, input_ids: Tensor) -> Tensor:
        x = nn.functional.one_hot(input_ids, VOCABULARY)[..., :WIDTH].float()
        for block in self.blocks:
            x = torch.tanh(block(x))
        logits = self.head(x)
        return logits * self.sometimes if self.uses_it else logits


def build(make: Callable[[], nn.Module]) -> BuiltModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return BuiltModel(make(), list(BLOCKS))


def another_order_later(model: Toy, step: int, microbatch: int, rank: int) -> None:
    model.order = (0, 1, 2) if step != 1 else (1, 0, 2)


def another_order_on_one_rank(model: Toy, step: int, microbatch: int, rank: int) -> None:
    model.order = (0, 1, 2) if rank != 1 else (1, 0, 2)


def unused_on_one_rank_later(model: LateRoot, step: int, microbatch: int, rank: int) -> None:
    """In the first step every rank uses everything: the order of gradients is agreed on."""
    model.uses_it = step == 0 or (step + rank) % 2 == 0


MODELS |= {
    "another_order_later": TestModel(partial(build, Toy), another_order_later, skips=True),
    "another_order_on_one_rank": TestModel(
        partial(build, Toy), another_order_on_one_rank, skips=True
    ),
    "late_root": TestModel(partial(build, LateRoot), unused_on_one_rank_later, skips=True),
}


def train_here(world: World, recipe: Recipe, make: Ours):
    """In this module, so that ranks know its models."""
    return train_on_ranks(world, recipe, make)


def train(ranks: Any, model: str, stage: str, world_size: int = 2, **options: Any) -> None:
    """Train on ranks and compare with the oracle, bit for bit."""
    recipe = Recipe(model=model, world_size=world_size, fused=False)
    make = Ours(stage, Options(**options))
    answers = ranks(train_here, recipe, make, world_size=world_size)
    rules = Rules(options.get("reduce_each", "step"))
    assert_same(outcome_of(answers), train_oracle(recipe, rules))


# -- what makes orders differ ----------------------------------------------------------------------


@crossed(
    "transport, stage",
    ["direct", "gloo", "native"],
    STAGES,
    quick=lambda transport, stage: transport == "direct" or stage in ("zero1", "zero3"),
)
def test_a_parameter_that_one_rank_skips_after_the_order_was_agreed(ranks, stage, transport):
    train(ranks, "late_root", stage, transport=transport, prefetch=1)


@crossed(
    "world_size, stage",
    [2, 3],
    ["ddp", "zero1_allreduce", "zero1", "zero2"],
    quick=lambda world_size, stage: (world_size == 3) == (stage == "zero2"),
)
def test_gradients_that_come_in_another_order_on_one_rank(ranks, stage, world_size):
    """(Where parameters rest sharded every rank must run the same units in one order: the gathers are collective.)"""
    train(ranks, "another_order_on_one_rank", stage, world_size)


@crossed(
    "prefetch, stage",
    [0, 1, 2],
    STAGES,
    # Nothing is gathered ahead where parameters rest whole.
    quick=lambda prefetch, stage: (stage, prefetch) in [("zero3", 2), ("zero2", 0), ("ddp", 0)],
)
def test_an_order_that_changes_from_step_to_step(ranks, stage, prefetch):
    train(ranks, "another_order_later", stage, prefetch=prefetch, transport="gloo")


# -- overlap and its twin --------------------------------------------------------------------------


def outcome_and_traffic(world: World, recipe: Recipe, make: Ours):
    strategy = build_on_rank(world, recipe, make)
    outcome = run_steps(strategy, world, recipe, range(recipe.steps))
    return outcome, pieces_of(strategy), strategy.wire.take_traffic()


@crossed(
    "transport, stage",
    ["direct", "gloo"],
    STAGES,
    quick=lambda transport, stage: (
        stage in (("ddp", "zero2") if transport == "direct" else ("zero1", "zero3"))
    ),
)
def test_the_twin_without_overlap_is_bit_equal_and_sends_the_same(ranks, stage, transport):
    """keep=none, since with fewer pools less survives from forward to backward."""
    results = []
    for overlap in (True, False):
        options = Options(overlap=overlap, prefetch=0, keep="none", transport=transport)
        answers = ranks(outcome_and_traffic, Recipe(fused=False), Ours(stage, options))
        outcome = outcome_of([(outcome, state) for outcome, state, _ in answers])
        results.append((outcome, [traffic for *_, traffic in answers]))
    (ahead, ahead_sent), (twin, twin_sent) = results
    assert ahead.losses == twin.losses and ahead.norms == twin.norms
    assert_same(ahead, twin)
    assert ahead_sent == twin_sent


# -- order of events, on one rank of two -----------------------------------------------------------


def toy_engine(world: World, stage: str, **options: Any) -> Sharded:
    make = Ours(stage, Options(transport="gloo", **options))
    return make(MODELS["toy"].build(), Recipe(fused=False), world)


def watch(strategy: Sharded) -> list[str]:
    """Everything that happens from now on: moves as they are issued, forwards as they begin, backwards as they end."""
    events: list[str] = []
    names = {id(chunk.chunk): unit.name or "root" for unit in strategy.units for chunk in unit.held}

    def log(move: Callable[..., Any]) -> Callable[..., Any]:
        def logged(parts: Any, kind: str, *more: Any, **words: Any) -> Any:
            events.append(f"{kind} {names[id(parts[0].chunk)]}")
            return move(parts, kind, *more, **words)

        return logged

    for move in ("all_gather", "reduce_scatter", "all_reduce"):
        setattr(strategy.wire, move, log(getattr(strategy.wire, move)))
    for name in BLOCKS:
        block = strategy.model.get_submodule(name)
        block.register_forward_pre_hook(lambda _m, _a, name=name: events.append(f"forward {name}"))
        block.register_full_backward_hook(
            lambda _m, _i, _o, name=name: events.append(f"done {name}")
        )
    return events


def step(strategy: Sharded, *, accumulation: int = 1, drain: bool = False) -> None:
    for index in range(accumulation):
        with strategy.microbatch(last=index == accumulation - 1):
            strategy.backward(strategy.model(microbatch_of(0, index, 0)[0]).float().sum())
    strategy.step(drain=drain)
    strategy.zero_grad()


def events_of_a_later_step(stage: str, *, accumulation: int = 1, **options: Any) -> list[str]:
    with fake_world(0, 2) as world:
        strategy = toy_engine(world, stage, **options)
        events = watch(strategy)
        step(strategy, accumulation=accumulation)
        events.clear()
        step(strategy, accumulation=accumulation)
        return list(events)


def test_a_loss_through_two_engines_is_told_to_be_inside_the_microbatches_of_both():
    with fake_world(0, 2) as world:
        inside, outside = toy_engine(world, "zero3"), toy_engine(world, "zero3")
        batch, _ = microbatch_of(0, 0, 0)
        told = pytest.raises(RuntimeError, match="of each engine that the loss goes through")
        with told, inside.microbatch(last=True):
            inside.backward(outside.model(batch).float().sum() + inside.model(batch).float().sum())


def test_zero3_gathers_one_block_ahead_and_reduces_behind():
    """The root and block 0 were gathered at the end of the step before.

    A block is reduced when the backward of the one before it begins, which every rank reaches in the same order.
    """
    assert events_of_a_later_step("zero3", prefetch=1, keep="last") == [
        *("gather blocks.1", "forward blocks.0", "gather blocks.2", "forward blocks.1"),
        "forward blocks.2",
        *("gather blocks.2", "gather blocks.1", "done blocks.2", "reduce blocks.2"),
        *("gather blocks.0", "done blocks.1", "reduce blocks.1"),
        *("done blocks.0", "reduce blocks.0"),
        *("reduce root", "gather root", "gather blocks.0"),
    ]


def test_zero3_without_prefetch_gathers_when_needed():
    assert events_of_a_later_step("zero3", prefetch=0, keep="none") == [
        "gather root",
        *("gather blocks.0", "forward blocks.0"),
        *("gather blocks.1", "forward blocks.1"),
        *("gather blocks.2", "forward blocks.2"),
        "gather root",
        *("gather blocks.2", "done blocks.2", "reduce blocks.2"),
        *("gather blocks.1", "done blocks.1", "reduce blocks.1"),
        *("gather blocks.0", "done blocks.0", "reduce blocks.0"),
        "reduce root",
    ]


def test_zero2_reduces_during_backward_and_publishes_in_order_of_forward():
    assert events_of_a_later_step("zero2") == [
        *("forward blocks.0", "forward blocks.1", "forward blocks.2"),
        *("reduce blocks.2", "done blocks.2"),
        *("reduce blocks.1", "done blocks.1"),
        *("reduce blocks.0", "done blocks.0", "reduce root"),
        *("publish root", "publish blocks.0", "publish blocks.1", "publish blocks.2"),
    ]


@pytest.mark.parametrize(("overlap", "most"), [(True, 3), (False, 1)])
@pytest.mark.parametrize("move", ["reduce_scatter", "all_gather"])
def test_between_hosts_two_moves_are_under_way_beside_the_one_just_launched(move, overlap, most):
    """More would hold the gradients, or the messages of updated parameters, of more units."""
    under_way: set[Any] = set()
    counts: list[int] = []
    with fake_world(0, 2) as world:
        strategy = toy_engine(world, "zero2", overlap=overlap)
        launch = getattr(strategy.wire, move)

        def counted(parts: Any, kind: str, *more: Any, **words: Any) -> Any:
            pending = launch(parts, kind, *more, **words)
            end = pending.wait
            pending.wait = lambda: (under_way.discard(pending), end())
            under_way.add(pending)
            counts.append(len(under_way))
            return pending

        setattr(strategy.wire, move, counted)
        step(strategy)
    assert len(counts) == len(["root", *BLOCKS])
    assert max(counts) == most
    assert not under_way


@pytest.mark.parametrize(("reduce_each", "times"), [("step", 1), ("microbatch", 3)])
@pytest.mark.parametrize("stage", ["ddp", "zero1_allreduce", "zero2", "zero3"])
def test_accumulated_gradients_are_reduced_as_often_as_asked(stage, reduce_each, times):
    events = events_of_a_later_step(stage, accumulation=3, reduce_each=reduce_each)
    for name in ("root", *BLOCKS):
        assert events.count(f"reduce {name}") == times


# -- what is gathered, and for how long ------------------------------------------------------------


def gathered(strategy: Sharded) -> set[str]:
    """Units that have parameters, or memory for them."""
    return {
        u.name for u in strategy.units if u.gather_state is not GatherState.FREED or full_bytes(u)
    }


def full_bytes(unit: Unit) -> int:
    return sum(memory.untyped_storage().nbytes() for memory in unit.states()["buffers"])


@pytest.mark.parametrize("unit", ["block", "module"])
@pytest.mark.parametrize("keep", ["none", "last"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_nothing_gathered_outlives_its_unit(unit, keep, prefetch):
    """While a block runs, only it, its parts, the root and what was gathered ahead have parameters."""
    with fake_world(0, 2) as world:
        strategy = toy_engine(world, "zero3", unit=unit, keep=keep, prefetch=prefetch)
        seen: list[tuple[str, set[str]]] = []
        for name in BLOCKS:
            block = strategy.model.get_submodule(name)
            block.register_forward_hook(
                lambda _m, _a, _o, name=name: seen.append((name, gathered(strategy)))
            )
        step(strategy)
        seen.clear()
        step(strategy)
        assert [name for name, _ in seen] == BLOCKS
        for name, units in seen:
            ahead = {u for u in units if u and not u.startswith(name) and u != "norm"}
            assert len(ahead) <= prefetch
        step(strategy, drain=True)
        assert gathered(strategy) == set()


@pytest.mark.parametrize("keep", ["none", "last", "all"])
def test_parameters_are_freed_after_an_evaluation_without_gradients(keep):
    with fake_world(0, 2) as world:
        strategy = toy_engine(world, "zero3", keep=keep, prefetch=1)
        step(strategy)
        with torch.no_grad():
            strategy.model(microbatch_of(0, 0, 0)[0])
        strategy.drain()
        assert gathered(strategy) == set()


def test_what_an_evaluation_gathered_ahead_does_not_outlive_the_step():
    """It would show the weights of before: block 1 is gathered when the evaluation ends early, in block 0."""

    def stop(*_: Any) -> None:
        raise ArithmeticError

    with fake_world(0, 2) as world, torch.no_grad():
        strategy = toy_engine(world, "zero3", prefetch=1)
        batch, _ = microbatch_of(0, 0, 0)
        strategy.model(batch)
        with torch.enable_grad(), strategy.microbatch(last=True):
            strategy.backward(strategy.model(batch).float().sum())
        handle = strategy.model.get_submodule("blocks.0").register_forward_hook(stop)
        with pytest.raises(ArithmeticError):
            strategy.model(batch)
        handle.remove()
        assert "blocks.1" in gathered(strategy)
        strategy.step(drain=True)
        assert not gathered(strategy)


class AgainBehind(nn.Sequential):
    """Block 1 runs before block 2, and once more behind it."""

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 2, 1, 3):
            x = self[index](x)
        return x


def test_a_block_that_runs_twice_is_freed_between_its_backwards():
    with fake_world(0, 2) as world:
        model = AgainBehind(*world_of_one.make_model())
        options = {"keep": "none", "prefetch": 0}
        strategy = world_of_one.engine(world, "zero3", "buffer", model=model, **options)
        seen: list[set[str]] = []
        model[2].register_full_backward_hook(lambda _m, _i, _o: seen.append(gathered(strategy)))
        for number in range(2):
            world_of_one.take_step(strategy, number)
    assert seen == [{"2", ""}] * 2 * world_of_one.MICROBATCHES


class Reentrant(nn.Sequential):
    """Each block runs forward again and backward inside of the loss' backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def test_a_block_is_freed_when_the_backward_inside_the_loss_backward_has_ended():
    with fake_world(0, 2) as world:
        model = Reentrant(*world_of_one.make_model())
        options = {"keep": "none", "prefetch": 0}
        strategy = world_of_one.engine(world, "zero3", "buffer", model=model, **options)
        seen: list[set[str]] = []
        for block in model[1:3]:
            block.register_forward_pre_hook(lambda _m, _i: seen.append(gathered(strategy)))
        world_of_one.take_step(strategy, 0)
    forward = [{"1", ""}, {"2", ""}]
    assert seen == [*forward, *reversed(forward)] * world_of_one.MICROBATCHES


# -- units inside units ------------------------------------------------------------------------------


def test_experts_move_with_the_module_that_chooses_among_them():
    """A rank may skip an expert, all of them, and the router: none may be a unit of its own."""
    with fake_world(0, 2) as world:
        make = Ours("zero3", Options(unit="module", transport="gloo"))
        strategy = make(MODELS["moe_by_turns"].build(), Recipe(), world)
        names = [unit.name for unit in strategy.units]
    assert "blocks.0.experts" in names
    assert not [name for name in names if name.startswith("blocks.0.experts.")]
    assert "blocks.0.attention.qkv" in names
