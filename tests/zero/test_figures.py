"""Bytes and counts written out by hand, beside the closed forms, which share functions with the engine."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from tests.descriptors import mappings_of_ours, open_now
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.measure.memory import bytes_by_kind
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import MIB, Dtypes, Options

BF16, FP32 = torch.bfloat16, torch.float32


def engine(
    world: World,
    stage: str,
    width: int,
    *,
    dtypes: Dtypes | None = None,
    bucket_bytes: int | None = None,
    transport: str = "gloo",
) -> Sharded:
    """Two blocks of width x width elements each, and nothing else."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
    return Sharded(
        module,
        blocks=["0", "1"],
        stage=STAGES[stage],
        param_groups=[{"params": list(module.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.01),
        world=world,
        dtypes=dtypes,
        options=Options(bucket_mb=bucket_bytes and bucket_bytes / MIB, transport=transport),
    )


def step(strategy: Sharded, width: int) -> None:
    dtype = strategy.optimizer.param_groups[0]["params"][0].dtype
    inputs = torch.ones(1, width, dtype=BF16 if dtype is BF16 else FP32)
    with strategy.microbatch(last=True):
        strategy.backward(strategy.model(inputs).float().sum())
    strategy.step()
    strategy.zero_grad()
    strategy.drain()


# -- buckets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduced_in", "bucket_bytes", "num_reductions"),
    [
        (BF16, 2048, 2),  # a block of 1024 elements is 2048 bytes: one reduction for each
        (BF16, 2047, 4),
        (BF16, 1024, 4),
        (FP32, 4096, 2),
        (FP32, 2048, 4),
        (BF16, None, 2),
    ],
)
def test_bytes_of_a_bucket_are_those_on_the_wire(reduced_in, bucket_bytes, num_reductions):
    dtypes = Dtypes(reduced_in, reduced_in, reduced_in)
    with fake_world(0, 2) as world:
        strategy = engine(world, "zero2", 32, dtypes=dtypes, bucket_bytes=bucket_bytes)
        step(strategy, 32)
        sent = strategy.wire.take_traffic()
    assert sent.calls_by_kind["reduce"] == num_reductions
    # all that the other rank owns: half of two blocks
    assert sent.bytes_by_kind["reduce"] == 1024 * reduced_in.itemsize


def bytes_of_slots(world: World, stage: str, bucket_bytes: int | None) -> int:
    strategy = engine(world, stage, 64, bucket_bytes=bucket_bytes, transport="direct")
    return strategy.model_states().hidden_bytes


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero2", "zero3"])
def test_a_slot_holds_a_bucket_and_not_a_unit(ranks, stage):
    """Blocks of 4096 elements, 16 KiB. Each rank owns a half, so a bucket of a quarter is all one rank's.

    Two slots: the reduction just launched, and the one under way beside it.
    """
    assert ranks(bytes_of_slots, stage, 4096) == [2 * 4096] * 2
    assert ranks(bytes_of_slots, stage, 1 << 20) == [2 * 8192] * 2


# -- a world of one -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "transport"), list(zip(STAGES, ["gloo", "native", "direct"] * 2, strict=False))
)
def test_alone_nothing_is_gathered_copied_or_freed(stage, transport):
    with fake_world(0, 1) as world:
        strategy = engine(world, stage, 32, transport=transport)
        for _ in range(2):
            step(strategy, 32)
        sent = strategy.wire.take_traffic()
        held = bytes_by_kind(strategy.model_states())
        sizes = [parameter.numel() for parameter in strategy.model.parameters()]
    assert held == {
        "parameters": 2 * 32 * 32 * 4,
        "gradients": 0,
        "optimizer": 0,
        "master": 0,
        "secondary": 0,
        "buffers": 0,
    }
    assert sizes == [32 * 32] * 2, "readable between steps"
    assert "gather" not in sent.calls_by_kind
    assert sum(sent.bytes_by_kind.values()) == 0


# -- what stays open --------------------------------------------------------------------------------


def left_open(world: World) -> tuple[set[tuple[str, str]], int]:
    """(descriptors, mappings of shared memory) that two engines that trained and are gone add to those of a first."""
    found = []
    for _ in range(3):
        strategy = engine(world, "zero3", 1000, transport="direct")
        step(strategy, 1000)
        del strategy
        gc.collect()
        found.append((open_now(), mappings_of_ours()))
    return found[2][0] - found[0][0], found[2][1] - found[0][1]


# torch's garbage collection does not see what a hook of register_post_accumulate_grad_hook refers to: a parameter
# whose hook leads back to it is never freed, and the engine with it.
def test_engines_that_are_gone_leave_nothing_open(ranks):
    assert ranks(left_open) == [(set(), 0)] * 2
