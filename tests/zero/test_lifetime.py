"""An engine ends with the last reference to it, whatever autograd still keeps: its weights and connections go too."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Options


class Keeps(nn.Linear):
    """Keeps its output, and so the graph behind it, in an attribute."""

    def forward(self, input: Tensor) -> Tensor:
        self.kept = super().forward(input)
        return self.kept


class Fails(nn.Linear):
    """Raises in its backward."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        output.register_hook(fail)
        return output


def fail(gradient: Tensor) -> Tensor:
    raise ArithmeticError


def train(world: World, stage: str, block: type[nn.Linear]) -> weakref.ref[Sharded]:
    model = nn.Sequential(nn.Linear(4, 4), block(4, 4), nn.Linear(4, 4))
    strategy = Sharded(
        model,
        blocks=["0", "1"],
        stage=STAGES[stage],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=torch.optim.SGD,
        world=world,
        options=Options(transport="native"),
    )
    with suppress(ArithmeticError), strategy.microbatch(last=True):
        strategy.backward(strategy.model(torch.randn(2, 4)).sum())
    return weakref.ref(strategy)


@pytest.mark.parametrize("block", [nn.Linear, Keeps, Fails])
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_nothing_that_autograd_keeps_keeps_the_engine(stage, block):
    with fake_world(0, 2) as world:
        strategy = train(world, stage, block)
        gc.collect()
        assert strategy() is None
