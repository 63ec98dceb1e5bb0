"""Gradients in bfloat16 are added up in float32, over uses, backwards, microbatches and ranks; only sums are that wide.

The oracle is a plain loop whose parameters have float32 gradients (`grad_dtype`), and masters in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process.world import World
from zeroexp.zero.options import Dtypes, Options

WIDTH, USES, STEPS, MICROBATCHES = 16, 12, 2, 2
BF16_MASTER = Dtypes(torch.bfloat16, torch.float32, torch.float32)
USED_ONCE = ["first.weight", "first.bias", "last.weight", "last.bias", "rows.weight"]
# Used several times, rows of a sparse gradient that come several times, what a hook computes with.
WIDE = ["tied.weight", "tied.bias", "hooked.weight"]


class Reusing(nn.Module):
    """A layer that is used once, one that is used several times, with a hook, of sparse rows, of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.tied, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.hooked = nn.Linear(WIDTH, WIDTH, bias=False)
        self.hooked.weight.register_hook(lambda gradient: gradient / 3)
        self.rows = nn.Embedding(2, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.rows(torch.arange(len(x)) % 2)
        x = x + self.hooked(x)
        for _ in range(USES):
            x = x + 0.3 * torch.tanh(self.tied(x))
        return self.last(x)


def loss_of(model: nn.Module, step: int, index: int, rank: int) -> Tensor:
    drawn = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    return model(torch.randn(8, WIDTH, generator=drawn).bfloat16()).float().square().sum()


def train_sharded(world: World, backwards: str, layout: str, transport: str) -> Any:
    model = Reusing()
    strategy = Sharded(
        model,
        blocks=["first", "tied"],
        stage=STAGES["zero3"],
        param_groups=[{"params": [*model.parameters()]}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.01),
        world=world,
        dtypes=BF16_MASTER,
        options=Options(layout=layout, transport=transport, reduce_each="microbatch"),
    )
    for step in range(STEPS):
        for index in range(MICROBATCHES):
            with strategy.microbatch(last=index == MICROBATCHES - 1):
                if backwards == "two":
                    loss_of(model, step, index + 5, world.rank).backward()
                strategy.backward(loss_of(model, step, index, world.rank))
        # Where all gradients of a microbatch come from one backward, those of weights used once stay narrow.
        seen = {name: parameter.grad_dtype for name, parameter in model.named_parameters()}
        strategy.step()
        strategy.zero_grad()
    named = {n: p.grad_dtype for n, p in model.named_parameters()}
    with strategy.gathered():
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, seen, named


def train_plainly(backwards: str, num_ranks: int) -> dict[str, Tensor]:
    model = Reusing()
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.bfloat16()
    for step in range(STEPS):
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for index in range(MICROBATCHES):
            of_ranks = {name: torch.zeros_like(master) for name, master in masters.items()}
            for rank in range(num_ranks):
                for parameter in model.parameters():
                    parameter.grad, parameter.grad_dtype = None, torch.float32
                if backwards == "two":
                    loss_of(model, step, index + 5, rank).backward()
                loss_of(model, step, index, rank).backward()
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    of_ranks[name] += parameter.grad.to_dense()
            for name, total in of_ranks.items():
                sums[name] += total
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                masters[name] -= 0.01 * sums[name]
                parameter.copy_(masters[name])
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("transport", ["direct", "native"])
@pytest.mark.parametrize("layout", ["buffer", "parameter"])
@pytest.mark.parametrize("backwards", ["one", "two"])
def test_sums_are_in_float32_and_other_gradients_are_not(
    ranks: Any, backwards: str, layout: str, transport: str
) -> None:
    theirs = train_plainly(backwards, 2)
    for weights, in_step, after in ranks(train_sharded, backwards, layout, transport):
        for name, weight in theirs.items():
            assert torch.equal(weights[name], weight), f"{name} differs"
        narrow = {name for name, dtype in after.items() if dtype is None}
        assert narrow == {*USED_ONCE}
        wide = {name for name, dtype in in_step.items() if dtype is torch.float32}
        assert wide == {*WIDE, *(USED_ONCE if backwards == "two" else [])}
