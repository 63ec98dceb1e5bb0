"""Engines around one small model with any optimizer, saved to the disk and taken up from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.checkpoint.saving import checkpoint, config_of
from tests.oracle import Recipe
from zeroexp.checkpoint.load import load
from zeroexp.checkpoint.save import Saver
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.engines.torch_ddp import TorchDDP
from zeroexp.engines.torch_fsdp2 import TorchFSDP2
from zeroexp.interface.strategy import Strategy
from zeroexp.process.world import World
from zeroexp.zero.options import Dtypes, Options


class Net(nn.Module):
    """A matrix, vectors, and a parameter without dimension where the engine takes one."""

    def __init__(self, *, scalar: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.gain = nn.Parameter(torch.tensor(0.5) if scalar else torch.tensor([0.5]))
        self.last = nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.gain)


SHARDED = ("zero1 tensor", "zero3 buffer", "zero2 parameter", "ddp buffer")
STATEFUL = ("ddp torch", "zero1 torch", "zero3 torch", *SHARDED)
Factory = Callable[[Any], torch.optim.Optimizer]


def build(
    world: World,
    engine: str,
    factory: Factory,
    dtype: torch.dtype = torch.float32,
    net: nn.Module | None = None,
) -> Strategy:
    torch.manual_seed(3)
    stage, _, layout = engine.partition(" ")
    net = net or Net(scalar=engine != "zero3 torch")
    matrices = [p for p in net.parameters() if p.ndim == 2]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    words: dict[str, Any] = {
        "param_groups": [{"params": matrices}, {"params": vectors, "lr": 0.05}],
        "optimizer_factory": factory,
        "world": world,
    }
    if engine == "zero3 torch":
        return TorchFSDP2(net, blocks=["first"], reshard_after_forward=True, **words)
    if layout == "torch":
        return TorchDDP(net, dtype=dtype, shard_optimizer=stage == "zero1", **words)
    return Sharded(
        net,
        blocks=["first"],
        stage=STAGES[stage],
        dtypes=Dtypes(dtype, dtype, dtype),
        options=Options(layout=layout, unit="model"),
        **words,
    )


def train(strategy: Strategy, world: World, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        with strategy.microbatch(last=True):
            dtype = next(strategy.model.parameters()).dtype
            x = torch.randn(4, 5, generator=generator).to(dtype)
            strategy.backward(strategy.model(x).square().sum() / world.size)
        strategy.step(drain=step == steps[-1])
        strategy.zero_grad()


def options(strategy: Strategy) -> str:
    """Of all groups beside parameters, with their types."""
    return repr(
        [{k: v for k, v in g.items() if k != "params"} for g in strategy.optimizer.param_groups]
    )


def save(strategy: Strategy, world: World, run: Path) -> None:
    saver = Saver(run, strategy, config_of(Recipe(steps=2)), world)
    saver.save_now(2)
    saver.close()


def take_up(strategy: Strategy, world: World, run: Path) -> None:
    load(checkpoint(run, 2), strategy, world)
