"""Every shipped model, narrow but with all its layers, under pairs of `strategy.unit` and stage: it ends, and rightly.

How many units there are depends on the number of layers: 80 layers by module are more than 700 units. One process that
does the obvious thing has the same losses; the second is taken with weights that the first step moved.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from tests.composing import options
from tests.oracle import Recipe
from tests.shrunk import loss_of, shrunk
from tests.strategies.engine import Ours
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.models.module import build_model
from zeroexp.process.world import World
from zeroexp.zero.options import Options

RANKS, STEPS = 2, 2
NAMES = [name for name in options("model") if name != "hf"]
UNITS, SHARDED = ["model", "block", "layer", "module"], ["zero1", "zero2", "zero3"]
QUICK = ["small", "moe_tiny"]  # the default model, and ranks that differ
ROUNDING = 2e-5  # of losses summed over ranks, in float32, and of weights after one step


@cache
def losses_of_one_process(name: str) -> list[float]:
    """Each rank's microbatch by itself, then the gradients of the ranks in order."""
    config, recipe = shrunk(name), Recipe().optimizer_config()
    module = build_model(config, seed=1).module
    optimizer = optimizer_factory(recipe)(parameter_groups(module, recipe, []))
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(RANKS):
            loss, number = loss_of(module, config, step, 0, rank)
            (loss / (number * RANKS)).backward()
            total += loss.item() / (number * RANKS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(world: World, name: str, make: Ours) -> list[float]:
    """This rank's share of the loss of each step."""
    config = shrunk(name)
    strategy = make(build_model(config, seed=1), Recipe(), world)
    losses = []
    for step in range(STEPS):
        with strategy.microbatch(last=True):
            loss, number = loss_of(strategy.model, config, step, 0, world.rank)
            strategy.backward(loss / (number * RANKS))
        strategy.step(drain=step == STEPS - 1)
        strategy.zero_grad()
        losses.append(loss.item() / (number * RANKS))
    return losses


def meet_by_pairs(name: str, unit: str, stage: str) -> bool:
    """Of units and stages, every two meet in some model, and each model has three of nine."""
    return (NAMES.index(name) + UNITS.index(unit) + SHARDED.index(stage)) % 3 == 1


def mark_of(name: str, stage: str) -> pytest.MarkDecorator:
    """Each model is slow under one stage, the stages in turns, and wide under the others."""
    return pytest.mark.slow if NAMES.index(name) % 3 == SHARDED.index(stage) else pytest.mark.wide


CASES = [
    pytest.param(name, unit, stage, marks=() if name in QUICK else mark_of(name, stage))
    for name, unit, stage in itertools.product(NAMES, UNITS, SHARDED)
    if meet_by_pairs(name, unit, stage)
]


@pytest.mark.parametrize(("name", "unit", "stage"), CASES)
def test_a_shipped_model_under_every_unit(ranks, name, unit, stage):
    make = Ours(stage, Options(layout="buffer", unit=unit))
    losses = [sum(each) for each in zip(*ranks(train, name, make, world_size=RANKS), strict=True)]
    expected = losses_of_one_process(name)
    torch.testing.assert_close(losses, expected, rtol=ROUNDING, atol=ROUNDING)
