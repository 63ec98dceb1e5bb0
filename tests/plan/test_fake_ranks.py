"""Every stage, layout and unit runs as one of 1,024 ranks on fake tensors, whose values nobody can read."""

from __future__ import annotations

import itertools
import sys
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroexp.config.keys import OptimizerConfig
from zeroexp.config.optimizer import optimizer_factory, parameter_groups
from zeroexp.cut.stage import STAGES
from zeroexp.models.module import materialize
from zeroexp.process.world import World, fake_world
from zeroexp.sharding.engine import Sharded
from zeroexp.sharding.options import Options

WIDTH, NUM_RANKS = 48, 1024
LAST = NUM_RANKS - 1
LAYOUTS = ("parameter", "tensor", "buffer")
UNITS = ("model", "block", "module")
BLOCKS = ["1", "2", "3"]


def model_on_meta() -> nn.Sequential:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))

    with torch.device("meta"):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(block() for _ in BLOCKS))


def train_two_steps(model: nn.Module, stage: str, layout: str, unit: str, world: World) -> Sharded:
    config = OptimizerConfig(max_grad_norm=1.0)
    strategy = Sharded(
        model,
        blocks=BLOCKS,
        stage=STAGES[stage],
        param_groups=parameter_groups(model, config),
        optimizer_factory=optimizer_factory(config),
        world=world,
        max_grad_norm=config.max_grad_norm,
        options=Options(family=layout, unit=unit),
    )
    for _ in range(2):
        for last in (False, True):
            with strategy.microbatch(last=last):
                strategy.backward(strategy.model(torch.empty(2, WIDTH)).square().mean())
        strategy.step()
        strategy.zero_grad()
    return strategy


def points() -> list[object]:
    """All points; the quick ones hold every stage, layout and unit."""
    found: list[object] = []
    for rank, stage, layout, unit in itertools.product((0, LAST), STAGES, LAYOUTS, UNITS):
        in_turn = [*STAGES].index(stage) == LAYOUTS.index(layout) + UNITS.index(unit)
        quick = rank == 0 and in_turn
        marks = () if quick else pytest.mark.slow
        found.append(pytest.param(rank, stage, layout, unit, marks=marks))
    return found


@pytest.mark.parametrize(("rank", "stage", "layout", "unit"), points())
def test_a_rank_trains_on_fake_tensors(rank, stage, layout, unit):
    model = model_on_meta()
    with fake_world(rank, NUM_RANKS) as world, FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        materialize(model, "cpu")
        strategy = train_two_steps(model, stage, layout, unit, world)
        held = strategy.model_states()
        num_bytes = sum(t.untyped_storage().nbytes() for t in held.parameters)
        whole = sum(4 * p.numel() for p in model_on_meta().parameters())
        if stage == "zero3":
            assert num_bytes <= whole // 4
        else:
            assert num_bytes >= whole


def test_a_world_that_has_ended_leaves_no_hook_for_errors_behind() -> None:
    """torch's own calls this process, which submits and runs other points, a rank."""
    before = sys.excepthook
    with fake_world(1, 2):
        pass
    assert sys.excepthook is before
