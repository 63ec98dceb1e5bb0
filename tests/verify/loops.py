"""Right loops, one for each row of a table: `loops.py:right_17` is a function that returns the Loop of row 17.

Each trains a small language model as a user of that library writes it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.silent_loops import WIDTH, Batch, Model, adamw, batch_of, loss_of
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process import world as worlds
from zeroexp.verify import Loop


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Right:
    """A row of the table."""

    engine: str = "plain"
    world: int = 2
    microbatches: int = 2
    clip: float | None = None
    tied: bool = False
    frozen: bool = False
    width: int = WIDTH
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    stage: str = "zero3"  # of ours
    halves: bool = False  # bf16 in forward and backward

    def loop(self) -> Loop:
        model = Model(self.width, tied=self.tied, frozen=self.frozen)
        return Loop(
            model=model,
            loss=loss_of,
            batch=batch_of,
            optimizer=self.optimizer,
            train=lambda model: ENGINES[self.engine](self, model),
            microbatches=self.microbatches,
            max_grad_norm=self.clip,
            dtype=torch.bfloat16 if self.halves else torch.float32,
        )


def backward_all(row: Right, model: Any, batches: Sequence[Batch]) -> None:
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()


def clip_and_step(row: Right, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if row.clip is not None:
        clip_grad_norm_(model.parameters(), row.clip)
    optimizer.step()
    optimizer.zero_grad()


def plain(row: Right, model: nn.Module) -> Any:
    optimizer = row.optimizer(model)

    def step(batches: Sequence[Batch]) -> None:
        backward_all(row, model, batches)
        for parameter in model.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        clip_and_step(row, model, optimizer)

    return step


def ddp(row: Right, model: nn.Module) -> Any:
    wrapped = DistributedDataParallel(model)
    if row.engine == "zero_redundancy":
        optimizer = ZeroRedundancyOptimizer(
            [p for p in model.parameters() if p.requires_grad],
            torch.optim.AdamW,
            lr=1e-2,
            weight_decay=0.1,
        )
    else:
        optimizer = row.optimizer(model)

    def step(batches: Sequence[Batch]) -> None:
        for index, batch in enumerate(batches):
            wrapped.require_backward_grad_sync = index == len(batches) - 1
            with torch.autocast("cpu", torch.bfloat16, enabled=row.halves):
                loss = loss_of(wrapped, batch)
            (loss / len(batches)).backward()
        clip_and_step(row, model, optimizer)

    return wrapped, step


def fsdp2(row: Right, model: nn.Module) -> Any:
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if row.halves
        else MixedPrecisionPolicy()
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = row.optimizer(model)

    def step(batches: Sequence[Batch]) -> None:
        for index, batch in enumerate(batches):
            model.set_requires_gradient_sync(index == len(batches) - 1)
            (loss_of(model, batch) / len(batches)).backward()
        clip_and_step(row, model, optimizer)

    return step


def sharded(row: Right, model: nn.Module) -> Any:
    world = worlds.current(model)
    strategy = Sharded(
        model,
        blocks=["blocks.0", "blocks.1"],
        stage=STAGES[row.stage],
        param_groups=[{"params": [p for p in model.parameters() if p.requires_grad]}],
        optimizer_factory=MAKE[row.optimizer],
        max_grad_norm=row.clip,
        world=world,
    )

    def step(batches: Sequence[Batch]) -> None:
        for index, batch in enumerate(batches):
            with strategy.microbatch(last=index == len(batches) - 1):
                loss = loss_of(strategy.model, batch)
                strategy.backward(loss / len(batches) / world.size)
        strategy.step()
        strategy.zero_grad()

    return strategy, step


# The same optimizers, of groups of parameters.
MAKE: dict[Any, Callable[[Any], torch.optim.Optimizer]] = {
    adamw: lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    sgd: lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}
ENGINES = {"plain": plain, "ddp": ddp, "zero_redundancy": ddp, "fsdp2": fsdp2, "sharded": sharded}


def rows() -> list[Right]:
    """100 right loops, drawn once and for all."""
    draw = random.Random(0)
    table: list[Right] = []
    while len(table) < 100:
        engine = list(ENGINES)[len(table) % len(ENGINES)]
        table.append(
            Right(
                engine,
                world=draw.choice([1, 2, 3, 4]),
                microbatches=draw.choice([1, 2, 3]),
                clip=draw.choice([None, 0.3, 100.0]),
                tied=draw.random() < 0.3,
                frozen=draw.random() < 0.3 and engine != "zero_redundancy",
                width=draw.choice([8, 12, 15]),
                optimizer=adamw if engine == "zero_redundancy" else draw.choice([adamw, sgd]),
                stage=draw.choice(list(STAGES)),
                halves=draw.random() < 0.5 and engine in ("fsdp2", "ddp"),
            )
        )
    return table


def __getattr__(name: str) -> Any:
    kind, _, number = name.partition("_")
    if kind != "right" or not number.isdigit():
        raise AttributeError(name)
    return rows()[int(number)].loop
