"""What a step asks of the backend, and how many operations the host launches, beside FSDP2 on the same model.

The calls of torch.distributed are noted in worlds whose other ranks do not exist; test_collectives.py notes the same
ones between real ranks. Other operations are counted where torch dispatches them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.growth import Dispatched, fsdp2, ours, take_step
from tests.comm.asked import LISTS, asking
from tests.crossed import crossed
from zeroexp.comm.collectives import take_traffic
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.strategy import Strategy
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Dtypes

WIDTH = 32
BLOCKS = [str(i) for i in range(1, 9)]  # with the root, nine units
LAYOUT_NAMES = ["parameter", "tensor", "buffer"]
NUM_TENSORS = 6  # of a block
# Launches of nine units: reductions, gathers, and one sum of the norm. In forward and backward of ZeRO-3 the root is
# gathered once, and the others twice.
ISSUED = {
    "ddp": 9 + 1,
    "zero1_allreduce": 9 + 9 + 1,
    "zero1": 9 + 9 + 1,
    "zero2": 9 + 9 + 1,
    "zero3": 9 + 9 + 8 + 1,
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)

    def block() -> nn.Sequential:
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        return nn.Sequential(up, nn.GELU(), down, nn.LayerNorm(WIDTH))

    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(block() for _ in BLOCKS), nn.Linear(WIDTH, WIDTH)
    )


def a_step(strategy: Strategy, compute: torch.dtype = torch.float32) -> None:
    take_step(strategy, torch.ones(2, WIDTH, dtype=compute))


def dispatched_in_a_step(strategy: Strategy, compute: torch.dtype) -> Dispatched:
    for _ in range(2):  # the first ones find out in which order units are used
        a_step(strategy, compute)
    with Dispatched() as dispatched:
        a_step(strategy, compute)
    return dispatched


def engine_of_nine_units(stage: str, layout: str, world: World, **options: Any) -> Sharded:
    return ours(stage, layout, make_model(), world, **options)


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [(64, stage) for stage in ISSUED] + [(size, "zero3") for size in (8, 1024)],
)
def test_each_move_is_one_launch_whose_bytes_are_counted(stage, world_size):
    """Evenly cut units take one call for each move; whole parameters take one, or one for each owner in a launch."""
    for layout in LAYOUT_NAMES:
        rank = world_size // 2
        with fake_world(rank, world_size) as world:
            strategy = engine_of_nine_units(stage, layout, world)
            for _ in range(2):
                a_step(strategy)
            take_traffic()
            with asking() as asked:
                a_step(strategy)
        told = take_traffic()
        assert len(asked.launches) == sum(told.calls_by_kind.values()) == ISSUED[stage], layout
        assert asked.sent_bytes(rank, world_size) == sum(told.bytes_by_kind.values()), layout
        calls = [call for launch in asked.launches for call in launch]
        assert not {call.name for call in calls} & set(LISTS)
        if layout != "parameter":
            assert len(calls) == len(asked.launches)
        for launch in asked.launches:
            owners = {call.rank for call in launch}
            assert len(owners) == len(launch) <= NUM_TENSORS


@crossed(
    "stage, world_size, compute",
    ["zero2", "zero3"],
    [8, 64, 1024],
    [torch.float32, torch.bfloat16],
    quick=lambda *each: each in [("zero2", 8, torch.float32), ("zero3", 64, torch.bfloat16)],
)
def test_the_host_launches_no_more_than_with_fsdp2(stage, world_size, compute):
    dtypes = Dtypes(compute, torch.float32, torch.float32)
    with fake_world(0, world_size) as world:
        theirs = dispatched_in_a_step(fsdp2(stage, make_model(), world, dtypes), compute)
        for layout in LAYOUT_NAMES:
            mine = dispatched_in_a_step(
                ours(stage, layout, make_model().to(compute), world, dtypes), compute
            )
            assert mine.counts.total() <= theirs.counts.total(), layout
            assert ISSUED[stage] <= theirs.num_collectives() + 1
