"""How many collectives and other operations the host launches in a step on the backend's own collectives.

Counted where torch dispatches them, in worlds whose other ranks do not exist, beside FSDP2 on the same model.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroexp.comm.collectives import take_traffic
from zeroexp.cut.stage import STAGES
from zeroexp.engines.torch_fsdp2 import TorchFSDP2
from zeroexp.interface.strategy import Strategy
from zeroexp.process.world import World, fake_world
from zeroexp.sharding.dtypes import Dtypes
from zeroexp.sharding.engine import Sharded
from zeroexp.sharding.options import Options

WIDTH = 32
BLOCKS = [str(i) for i in range(1, 9)]  # with the root, nine units
FAMILIES = ["parameter", "tensor", "buffer"]
# Of nine units. In forward and backward of ZeRO-3 the root is gathered once, and the others twice.
ISSUED = {
    "ddp": {"allreduce_": 9 + 1},
    "zero1": {"reduce": 9, "gather": 9, "allreduce_": 1},
    "zero2": {"reduce": 9, "gather": 9, "allreduce_": 1},
    "zero3": {"reduce": 9, "gather": 9 + 8, "allreduce_": 1},
}


class Dispatched(TorchDispatchMode):
    """Counts the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def collectives(self) -> dict[str, int]:
        names = {
            "_allgather_base_": "gather",
            "allgather_": "gather",
            "_reduce_scatter_base_": "reduce",
            "reduce_scatter_": "reduce",
        }
        found: Counter[str] = Counter()
        for name, count in self.counts.items():
            if name.startswith("c10d."):
                verb = name.split(".")[1]
                found[names.get(verb, verb)] += count
        return dict(found)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)

    def block() -> nn.Sequential:
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        return nn.Sequential(up, nn.GELU(), down, nn.LayerNorm(WIDTH))

    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(block() for _ in BLOCKS), nn.Linear(WIDTH, WIDTH)
    )


def a_step(strategy: Strategy) -> None:
    with strategy.microbatch(last=True):
        strategy.backward(strategy.model(torch.ones(2, WIDTH)).square().mean())
    strategy.step()
    strategy.zero_grad()


def dispatched_in_a_step(strategy: Strategy) -> Dispatched:
    for _ in range(2):  # the first ones find out in which order units are used
        a_step(strategy)
    take_traffic()
    with Dispatched() as dispatched:
        a_step(strategy)
    return dispatched


def common(model: nn.Module, world: World) -> dict[str, Any]:
    return {
        "blocks": BLOCKS,
        "param_groups": [{"params": list(model.parameters())}],
        "optimizer_factory": lambda groups: torch.optim.AdamW(groups, foreach=True),
        "max_grad_norm": 1.0,
        "world": world,
    }


def fsdp2(stage: str, world: World) -> Strategy:
    model = make_model()
    dtypes = Dtypes(torch.float32, torch.float32, torch.float32)
    keeps = {"reshard_after_forward": stage == "zero3"}
    return TorchFSDP2(model, dtypes=dtypes, **keeps, **common(model, world))


def ours(stage: str, family: str, world: World, **options: Any) -> Sharded:
    model = make_model()
    chosen = Options(family=family, **{"transport": "native", **options})
    return Sharded(model, stage=STAGES[stage], options=chosen, **common(model, world))


@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize("stage", ISSUED)
def test_one_collective_for_each_unit_and_move(stage, world_size):
    with fake_world(0, world_size) as world:
        for family in FAMILIES:
            strategy = ours(stage, family, world)
            assert dispatched_in_a_step(strategy).collectives() == ISSUED[stage], family
            told = take_traffic().calls_by_kind
            assert sum(told.values()) == sum(ISSUED[stage].values()), family


@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_the_host_launches_no_more_than_with_fsdp2(stage, world_size):
    with fake_world(0, world_size) as world:
        theirs = dispatched_in_a_step(fsdp2(stage, world))
        for family in FAMILIES:
            mine = dispatched_in_a_step(ours(stage, family, world))
            issued = sum(mine.collectives().values())
            assert issued <= sum(theirs.collectives().values()) + 1, family
            assert mine.counts.total() <= 1.05 * theirs.counts.total(), family
