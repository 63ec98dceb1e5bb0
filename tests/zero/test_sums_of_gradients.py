"""Gradients in bfloat16 are added up in float32, over uses, backwards, microbatches and ranks; only sums are that wide.

The oracle is a plain loop whose parameters have float32 gradients (`grad_dtype`), and masters in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.comm.test_issued import a_step, engine_of_nine_units
from tests.crossed import crossed
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process.world import World, fake_world
from zeroexp.zero.gradients import ChunkGradients
from zeroexp.zero.options import Dtypes, Options

WIDTH, USES, STEPS, MICROBATCHES = 16, 12, 2, 2
BF16_MASTER = Dtypes(torch.bfloat16, torch.float32, torch.float32)
ALONE = {"first.weight", "first.bias", "last.weight", "gain", "rows.weight"}


class Reusing(nn.Module):
    """Layers that are used once, several times, and as often as a microbatch says; a gain that computes in float32, a
    weight and a bias whose gradients hooks change, and rows of which some are used twice.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.tied, self.later, self.hooked, self.last = (
            nn.Linear(WIDTH, WIDTH, bias=number != 3) for number in range(5)
        )
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.rows = nn.Embedding(3, WIDTH, sparse=True)
        self.hooked.weight.register_hook(lambda gradient: 1.7 * gradient)
        self.last.bias.register_post_accumulate_grad_hook(_scale)

    def forward(self, x: Tensor, uses_later: int) -> Tensor:
        x = self.first(x) + self.rows(torch.arange(len(x)) % 3)
        for _ in range(USES):
            x = x + 0.3 * torch.tanh(self.tied(x))
        for _ in range(uses_later):
            x = x + 0.3 * torch.tanh(self.later(x))
        return self.last(self.hooked((x.float() * self.gain).bfloat16()))


def _scale(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(1.7)


def loss_of(model: nn.Module, step: int, index: int, rank: int) -> Tensor:
    drawn = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    inputs = torch.randn(8, WIDTH, generator=drawn).bfloat16()
    return model(inputs, USES * index + 1).float().square().sum()


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
    narrow: list[set[str]] = []
    for step in range(STEPS):
        for index in range(MICROBATCHES):
            with strategy.microbatch(last=index == MICROBATCHES - 1):
                if backwards == "two":
                    loss_of(model, step, index + 5, world.rank).backward()
                strategy.backward(loss_of(model, step, index, world.rank))
                named = model.named_parameters()
                narrow.append({name for name, p in named if p.grad_dtype is None})
        strategy.step()
        strategy.zero_grad()
    with strategy.gathered():
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, narrow


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


@crossed(
    "backwards, layout, transport",
    ["one", "two"],
    ["buffer", "parameter"],
    ["direct", "native"],
    # Every two values meet.
    quick=lambda *each: sum(value in ("two", "parameter", "native") for value in each) % 2 == 0,
)
def test_sums_are_in_float32_and_other_gradients_are_not(ranks, backwards, layout, transport):
    theirs = train_plainly(backwards, 2)
    in_first = {*ALONE, "later.weight", "later.bias"}
    expected = [in_first, ALONE] if backwards == "one" else [set[str]()] * MICROBATCHES
    for weights, narrow in ranks(train_sharded, backwards, layout, transport):
        for name, weight in theirs.items():
            assert torch.equal(weights[name], weight), f"{name} differs"
        assert narrow == expected * STEPS


@pytest.mark.parametrize(("stage", "allocates"), [("zero1", False), ("zero2", True)])
def test_sums_of_gradients_that_rest_partial_lie_in_these(stage, allocates, monkeypatch):
    """In buckets too of which this rank has no part."""
    calls: list[ChunkGradients] = []
    allocate = ChunkGradients._allocate_sums
    monkeypatch.setattr(ChunkGradients, "_allocate_sums", lambda g: (calls.append(g), allocate(g)))
    with fake_world(0, 4) as world:  # the last ranges are reduced first, and are of other ranks
        a_step(engine_of_nine_units(stage, "buffer", world, bucket_mb=1e-4))
    assert bool(calls) is allocates
