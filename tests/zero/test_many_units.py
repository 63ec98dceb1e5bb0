"""Any number of units, of tensors in one, and of forwards: no rank waits for another to listen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.crossed import crossed
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process.world import World, barrier, fake_world
from zeroexp.zero.options import Options

LR = 0.1


class Chain(nn.Module):
    """So many units of one weight each, or one unit of so many tensors; cheap enough for a thousand."""

    def __init__(self, num_blocks: int, num_tensors: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(num_tensors) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        rising = ((1 + i) / num_tensors for i in range(num_tensors))  # each another one
        self.weights = nn.ParameterList(torch.full((2,), 1e-3 * value) for value in rising)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack(list(self.weights)).sum(0)


def engine(
    world: World, stage: str, num_blocks: int, num_tensors: int, layout: str, **options: Any
) -> Sharded:
    module = Chain(num_blocks, num_tensors)
    return Sharded(
        module,
        blocks=[f"blocks.{i}" for i in range(num_blocks)],
        stage=STAGES[stage],
        param_groups=[{"params": list(module.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=LR),
        world=world,
        options=Options(layout=layout, **options),
    )


def train(strategy: Sharded, world: World, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        with strategy.microbatch(last=True):
            loss = strategy.model(torch.full((2,), float(world.rank))).sum()
            strategy.backward(loss / world.size)
        strategy.step()
        strategy.zero_grad()
        losses.append(loss.item())
    strategy.drain()
    return losses


def many(world: World, stage: str, num_blocks: int, num_tensors: int, layout: str) -> None:
    """The gradient of each element is one: every step takes LR off each of two elements of each tensor."""
    strategy = engine(world, stage, num_blocks, num_tensors, layout)
    losses = train(strategy, world, 2)
    total = 2 * num_blocks * num_tensors
    mean = 1e-3 * (num_tensors + 1) / (2 * num_tensors)
    expected = [2.0 * world.rank + total * (mean - LR * step) for step in range(2)]
    assert losses == pytest.approx(expected, rel=1e-3)
    barrier()


STAGES_OF_ISSUE = ["zero1", "zero2", "zero3"]


@pytest.mark.parametrize("stage", ["zero1", pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_a_hundred_units(ranks, stage):
    ranks(many, stage, 100, 1, "buffer")


def test_a_hundred_units_on_three_ranks(ranks):
    """Each waits for the next one to read: a ring."""
    ranks(many, "zero3", 100, 1, "buffer", world_size=3)


@pytest.mark.slow
def test_many_chunks_fill_the_buffer_sooner(ranks):
    ranks(many, "zero3", 50, 40, "tensor")


def test_one_unit_of_many_chunks(ranks):
    """More than one message or packet could tell the places of."""
    ranks(many, "zero3", 1, 600, "tensor")


@pytest.mark.parametrize("stage", STAGES_OF_ISSUE)
@pytest.mark.parametrize(
    "num_blocks",
    [pytest.param(300, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.wide)],
)
def test_hundreds_of_units(ranks, stage, num_blocks):
    ranks(many, stage, num_blocks, 1, "buffer")


@pytest.mark.parametrize(
    "stage",
    [pytest.param("zero2", marks=pytest.mark.wide), pytest.param("zero3", marks=pytest.mark.slow)],
)
def test_ten_thousand_tensors_in_one_unit(ranks, stage):
    ranks(many, stage, 1, 10_000, "buffer")
    ranks(many, stage, 1, 10_000, "tensor")


def num_lines(call: Callable[[], object]) -> int:
    """How many lines of ours run, each turn of a loop counted."""
    lines = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if "/zeroexp/" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def lines_to_build(
    world: World, shapes: list[tuple[int, int]], stage: str, layout: str
) -> list[int]:
    """How many it takes to build an engine of each shape, and its state."""
    engine(world, stage, 1, 1, layout).state_dict()  # what is done once
    return [
        num_lines(lambda shape=shape: engine(world, stage, *shape, layout).state_dict())
        for shape in shapes
    ]


def lines_of_a_step(shape: tuple[int, int], stage: str, layout: str) -> int:
    """Of the third one, which gathers ahead in the order of the first; of a rank whose peer does not exist."""
    with fake_world(0, 2) as world:
        strategy = engine(world, stage, *shape, layout, transport="native")
        train(strategy, world, 2)
        return num_lines(lambda: train(strategy, world, 1))


def assert_linear(counted: Sequence[int], step: int) -> None:
    """The second difference of what is linear is nothing, and of one turn for each pair it is twice `step` squared."""
    one, two, three = counted
    assert abs(three - 2 * two + one) < step * step / 10


@pytest.mark.slow
@crossed(
    "kind, way",
    ["blocks", "tensors"],
    ["zero1 tensor", "zero3 buffer", "zero3 parameter"],
    quick=lambda kind, way: (kind == "blocks") == (way == "zero3 parameter"),
)
def test_building_takes_as_long_for_each_parameter(ranks, kind, way):
    for counted in ranks(lines_to_build, shapes_of(kind, step=60), *way.split()):
        assert_linear(counted, step=60)


@pytest.mark.parametrize(
    ("kind", "way"),
    [("blocks", "zero1 tensor"), ("blocks", "zero3 buffer"), ("tensors", "zero3 parameter")],
)
def test_a_step_takes_as_long_for_each_unit(kind, way):
    assert_linear([lines_of_a_step(s, *way.split()) for s in shapes_of(kind, step=20)], step=20)


def shapes_of(kind: str, step: int) -> list[tuple[int, int]]:
    sizes = (step, 2 * step, 3 * step)
    return [(size, 1) if kind == "blocks" else (1, size) for size in sizes]
