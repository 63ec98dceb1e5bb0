"""The peak of a step is explained: states and buffers as they are held, and at most 1.10 times the activations.

What is held equals the closed forms (tests/plan/test_closed_forms.py). Activations are what one process needs for the
same pass beside its parameters when every gradient is dropped as it comes.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from benchmarks.engines import SEQ_LEN, build_engine, model_config
from zeroexp.engines.sharded import Sharded
from zeroexp.measure.memory import AllocationMeter, bytes_by_kind, count_cpu_allocations
from zeroexp.models.loss import loss_sum
from zeroexp.models.module import build_model
from zeroexp.process.world import World, barrier

CPU = torch.device("cpu")
MODEL = "small"


def tokens() -> Tensor:
    return torch.randint(2000, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))


def loss_of(module: torch.nn.Module) -> Tensor:
    return loss_sum(module(input_ids=tokens()[:, :-1]), tokens()[:, 1:], "causal") / SEQ_LEN


def held_now() -> int:
    gc.collect()
    held = AllocationMeter(CPU).peak_bytes()
    assert held is not None
    return held


def most_beside(before: int, meter: AllocationMeter) -> int:
    peak = meter.peak_bytes()
    assert peak is not None
    return peak - before


def activation_bytes(world: World) -> int:
    assert count_cpu_allocations() is None
    module = build_model(model_config(MODEL), seed=0, device="cpu").module
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    loss_of(module).backward()
    before = held_now()
    meter = AllocationMeter(CPU)
    loss_of(module).backward()
    return most_beside(before, meter)


def peak_and_states(world: World, engine: str) -> tuple[int, int]:
    """(most bytes of a step, bytes held between its backward and its optimizer) of this rank."""
    assert count_cpu_allocations() is None
    before = held_now()
    strategy = build_engine(engine, model_config(MODEL), precision="fp32", world=world)
    assert isinstance(strategy, Sharded)
    states = 0
    for number in range(2):
        meter = AllocationMeter(CPU)
        with strategy.microbatch(last=True):
            strategy.backward(loss_of(strategy.model))
        if number == 1:
            states = sum(bytes_by_kind(strategy.model_states()).values())
        strategy.step()
        strategy.zero_grad()
        strategy.drain()
    peak = most_beside(before, meter) + strategy.wire.held_shared_bytes
    barrier()  # no rank closes its connections while another still reads
    return peak, states


@pytest.fixture(scope="module")
def activations(ranks) -> int:
    return ranks(activation_bytes, world_size=1)[0]


# The others are rehearsed to the byte: tests/plan/test_rehearse.py, test_planned_peak.py.
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero3", "ddp", "zero1", "zero2"])
def test_nothing_but_states_and_activations(ranks, activations, stage):
    for rank, (peak, states) in enumerate(ranks(peak_and_states, f"{stage}_buffer")):
        beside = peak - states
        assert 0 < beside <= 1.10 * activations, (rank, peak, states, activations)
