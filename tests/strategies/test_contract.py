"""What every engine promises to the loop, ours and native alike: it trains like the oracle, and its state goes on.

Which engine equals the oracle bit for bit, and which within a tolerance, stands in tests/engines.py. Of ours, what a
setting changes is compared by pairs of settings in tests/strategies/test_parity.py, and here of one engine, as a config
builds it; that a state goes on, in files and at other world sizes, in tests/checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engines import DEEPSPEED, ENGINES, EVERY_ENGINE, NATIVE, OURS, Engine, check, marks_of
from tests.oracle import (
    Make,
    Recipe,
    assembled,
    build_on_rank,
    pieces_of,
    run_steps,
    train_on_ranks,
    train_oracle,
)
from zeroexp.interface.canonical import merge
from zeroexp.interface.strategy import CanonicalState
from zeroexp.process.world import World

NATIVE_AND_ONE_OF_OURS = {**NATIVE, **DEEPSPEED, "zero3_buffer": OURS["zero3_buffer"]}


def each_of(engines: dict[str, Engine]) -> pytest.MarkDecorator:
    each = [pytest.param(engines[name], id=name, marks=marks_of(name)) for name in engines]
    return pytest.mark.parametrize("engine", each)


every_engine = each_of(EVERY_ENGINE)
native = each_of({**NATIVE, **DEEPSPEED})
native_and_one = each_of(NATIVE_AND_ONE_OF_OURS)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        pytest.param(size, name, marks=marks_of(name))
        for size, engines in ((2, EVERY_ENGINE), *((n, NATIVE_AND_ONE_OF_OURS) for n in (1, 3)))
        for name in engines
    ],
)
def test_trains_like_the_oracle(ranks, name, world_size):
    check(ranks, EVERY_ENGINE[name], Recipe(world_size=world_size))


RECIPES = {
    "one_microbatch": Recipe(accumulation=1),
    # The first steps' norms are about 1, so that this threshold scales every gradient.
    "clipping": Recipe(max_grad_norm=0.1),
    "checkpointing": Recipe(checkpointing=True),
    "a_block_that_runs_twice": Recipe(model="reused"),
}


@native
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_training_may_ask_for(ranks, engine, recipe):
    if engine in (ENGINES["fsdp2"], ENGINES["fsdp2_no_reshard"]) and "twice" in recipe:
        engine = replace(engine, exact_up_to=0)  # it reduces between the two backwards of a block
    if recipe == "clipping":
        assert min(train_oracle(RECIPES[recipe], engine.rules).norms) > 0.1
    check(ranks, engine, RECIPES[recipe])


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, p, marks=marks_of(name))
        for name, engine in NATIVE_AND_ONE_OF_OURS.items()
        for p in engine.precisions
        if p != "fp32"
    ],
)
def test_precision(ranks, name, precision):
    check(ranks, NATIVE_AND_ONE_OF_OURS[name], Recipe(precision=precision))


# -- its state --------------------------------------------------------------------------------------


# Changes that make a state one that can not be loaded over a trained engine, and what the rank that was given it says.
WRONG_STATES: dict[str, tuple[Callable[[CanonicalState], Any], str]] = {
    "pieces": (
        lambda state: {
            n: {k: replace(t, pieces=[]) for k, t in e.items()} for n, e in state.items()
        },
        r"elements \d+ to \d+ of .* are in no piece",
    ),
    "moments": (
        lambda state: {name: {"weight": entry["weight"]} for name, entry in state.items()},
        "weights and no moments",
    ),
    "more": (
        lambda state: state | {"other": next(iter(state.values()))},
        "parameter other of the state is not in the model",
    ),
    "less": (lambda state: dict(list(state.items())[1:]), "parameter .* is not in the state"),
    "path": (lambda state: "state.pt", "the state is a str"),
}


def load_what_is_wrong(world: World, recipe: Recipe, make: Make, state: CanonicalState):
    """Rank 1 alone is given something wrong, and then all of them the state of before."""
    strategy = build_on_rank(world, recipe, make)
    run_steps(strategy, world, recipe, range(1))
    before, said = pieces_of(strategy), []
    for change, _ in WRONG_STATES.values():
        try:
            strategy.load_state_dict(change(state) if world.rank == 1 else state)
        except ValueError as error:
            said.append(str(error))
    unchanged = pieces_of(strategy)
    strategy.load_state_dict(state)
    return said, before, unchanged, pieces_of(strategy)


@pytest.fixture(scope="module")
def saved(ranks) -> CanonicalState:
    """A state is the same whichever engine gives it."""
    answers = ranks(train_on_ranks, Recipe(steps=1), ENGINES["zero3_buffer"].make)
    return merge([state for _, state in answers])


@native_and_one
def test_what_one_rank_can_not_load_all_refuse_and_nothing_changes(ranks, engine, saved):
    answers = ranks(load_what_is_wrong, Recipe(steps=1), engine.make, saved)
    others, own = (said for said, *_ in answers)
    for message, (_, expected) in zip(own, WRONG_STATES.values(), strict=True):
        assert re.match(rf"strategy\.load_state_dict: .*{expected}", message), message
    assert others == own
    before, unchanged, loaded = (assembled(s) for s in list(zip(*answers, strict=True))[1:])
    torch.testing.assert_close(unchanged, before, rtol=0, atol=0)
    torch.testing.assert_close(loaded, assembled([saved]), rtol=0, atol=0)


# -- what it holds ----------------------------------------------------------------------------------


def learning_rate_zero(world: World, recipe: Recipe, make: Make):
    strategy = build_on_rank(world, recipe, make)
    before = pieces_of(strategy)
    for group in strategy.optimizer.param_groups:
        group["lr"] = 0.0
    run_steps(strategy, world, recipe, range(1))
    return before, pieces_of(strategy)


@every_engine
def test_the_learning_rate_is_read_from_its_groups(ranks, engine):
    answers = ranks(learning_rate_zero, Recipe(), engine.make)
    before, after = (assembled(states) for states in zip(*answers, strict=True))
    for name in before:
        assert torch.equal(before[name]["weight"], after[name]["weight"]), name
