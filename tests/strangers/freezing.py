"""What moves and what does not: frozen, thawed, unused, adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.strangers.lab import (
    EVERY_WAY,
    WIDTH,
    Batch,
    Lab,
    adamw,
    plain_loss,
    scenario,
    sgd,
    variants,
)
from tests.strangers.models import Block, Net

OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


@variants([*OPTIMIZERS], EVERY_WAY)
def frozen_from_the_start_under(lab: Lab, name: str) -> None:
    model = Net()
    model.layers[1].requires_grad_(False)
    model.inp.requires_grad_(False)
    model.layers[0].norm.requires_grad_(False)
    lab.train(lab.wrap(model, optimizer=OPTIMIZERS[name]), num_microbatches=2)


@scenario(EVERY_WAY)
def everything_frozen_but_the_head(lab: Lab) -> None:
    """A linear probe; the optimizer is given only what trains."""
    model = Net().requires_grad_(False)
    model.head.requires_grad_(True)
    lab.train(lab.wrap(model, groups=[{"params": list(model.head.parameters())}]))


@scenario(EVERY_WAY)
def everything_frozen_but_the_first_layer(lab: Lab) -> None:
    """Backward goes through frozen blocks only."""
    model = Net().requires_grad_(False)
    model.inp.requires_grad_(True)
    lab.train(lab.wrap(model), num_microbatches=2)


@variants([*OPTIMIZERS], EVERY_WAY)
def a_block_frozen_after_the_first_step_under(lab: Lab, name: str) -> None:
    """It stops where it is: no decay, no momentum."""
    t = lab.wrap(Net(), optimizer=OPTIMIZERS[name])
    lab.train(t, steps=[0])
    t.model.layers[1].requires_grad_(False)
    lab.train(t, steps=[1, 2], num_microbatches=2)


@variants(["block", "weight", "root", "first_block"], EVERY_WAY)
def frozen_after_wrapping(lab: Lab, what: str) -> None:
    """Before the first step, after the optimizer was made."""
    t = lab.wrap(Net(), optimizer=adamw)
    frozen = {
        "block": t.model.layers[2],
        "weight": t.model.layers[1].up.weight,
        "root": t.model.inp,
        "first_block": t.model.layers[0],
    }[what]
    frozen.requires_grad_(False)
    lab.train(t)


@scenario(EVERY_WAY)
def frozen_and_thawed_again(lab: Lab) -> None:
    """A block trainable from the start rests for two steps (alternating training)."""
    t = lab.wrap(Net(), optimizer=adamw)
    for step in range(5):
        t.model.layers[1].requires_grad_(step not in (1, 2))
        lab.train(t, steps=[step])


@scenario()
def frozen_between_microbatches(lab: Lab) -> None:
    """What came before counts: the block has a gradient of the first microbatch."""
    t = lab.wrap(Net())
    for step in range(2):
        for batch in lab.batches(step, 2):
            t.model.layers[1].requires_grad_(batch.microbatch == 0)
            with t.microbatch(last=batch.last):
                t.backward(plain_loss(t.model, batch))
        lab.note(t.step())
        t.zero_grad()


THAWED = r"requires_grad|frozen|trainable|thaw"


@variants(["block", "weight", "head"], EVERY_WAY, refused=THAWED)
def thawed_after_wrapping(lab: Lab, what: str) -> None:
    """No master weights and no optimizer state were made for it."""
    model = Net()
    frozen = {"block": model.layers[1], "weight": model.layers[1].up.weight, "head": model.head}
    frozen[what].requires_grad_(False)
    t = lab.wrap(model)
    lab.train(t, steps=[0])
    frozen[what].requires_grad_(True)
    lab.train(t, steps=[1])


# -- unused -------------------------------------------------------------------------------------------


class WithSpare(Block):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, 3)


class WithSpareNet(Net):
    def __init__(self) -> None:
        super().__init__(WithSpare)
        self.unused = nn.Parameter(torch.ones(5))


@variants([*OPTIMIZERS], EVERY_WAY)
def unused_weights_under(lab: Lab, name: str) -> None:
    """In the root and in every block, for no rank ever: torch neither decays nor moves them."""
    lab.train(lab.wrap(WithSpareNet(), optimizer=OPTIMIZERS[name]), num_microbatches=2)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.chosen = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.chosen:
            x = x + torch.tanh(self.experts[index](x))
        return x


@variants(["same_on_all", "by_rank", "by_turns", "never_one"], EVERY_WAY)
def experts_chosen(lab: Lab, how: str) -> None:
    """An expert nobody used in a step does not move; one that a single rank used moves by that rank's gradient."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        choices = {
            "same_on_all": (batch.step % 3,),
            "by_rank": (batch.rank,),
            "by_turns": ((batch.step + batch.microbatch + batch.rank) % 3,),
            "never_one": (0, 2),
        }
        for layer in model.layers:
            layer.chosen = choices[how]
        return plain_loss(model, batch)

    t = lab.wrap(Net(Experts), optimizer=adamw)
    lab.train(t, loss, steps=range(4), num_microbatches=2)


@scenario(EVERY_WAY, may_refuse=r"parameter|optimizer|group")
def weights_that_no_group_has(lab: Lab) -> None:
    """Trainable, but not given to the optimizer: torch makes gradients and moves nothing."""
    model = Net()
    some = [*model.inp.parameters(), *model.layers[0].parameters(), *model.head.parameters()]
    lab.train(lab.wrap(model, groups=[{"params": some}]))


# -- adapters -----------------------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(2, base.in_features, generator=generator) * 0.3)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))
        self.off = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.off else y + x @ self.a.t() @ self.b.t()


def with_adapters() -> Net:
    model = Net().requires_grad_(False)
    for layer in model.layers:
        layer.up = LoRA(layer.up)
        layer.down = LoRA(layer.down)
    return model


@scenario()
def adapters_merged_into_their_base(lab: Lab) -> None:
    """Inside the writing context a frozen weight is written, too."""
    t = lab.wrap(with_adapters())
    lab.train(t, steps=[0, 1])
    with t.gathered(write=True), torch.no_grad():
        for module in t.model.modules():
            if isinstance(module, LoRA):
                module.base.weight.add_(module.b @ module.a)
                module.b.zero_()
    lab.train(t, steps=[2])


@scenario(may_refuse=r"grad|trainable|parameter")
def nothing_trains(lab: Lab) -> None:
    """The whole model is frozen: only evaluation, steps do nothing."""

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1)

    model = Net().requires_grad_(False)
    t = lab.wrap(model, optimizer=optimizer)
    for batch in lab.batches(0):
        with t.microbatch(last=True):
            batch.note(t.model(batch.x))
    t.step()
    t.zero_grad()
