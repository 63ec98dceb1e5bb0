"""A rehearsal adds gradients in place where autograd does with real tensors, and anew where it does not."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.plan.test_absent_neighbours import real_peak
from tests.plan.test_planned_peak import NUM_RANKS, SCRATCH_BYTES, WIDE, planned
from tests.plan.test_rehearse import CPU, config_of
from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.plan.hidden_memory import GradientSums
from zeroexp.plan.rehearse import prepared
from zeroexp.plan.storages import Storages

SIDE = 256
MATRIX_BYTES = 4 * SIDE * SIDE
ELEMENTS_BYTES = 8 * 64  # of sums and their gradients, which have one element


def used_twice(weight: Tensor) -> Tensor:
    return (weight * 2).sum() + (weight * 3).sum()


def first_as_a_view(weight: Tensor) -> Tensor:
    return (weight * 2).sum() + (weight.t() * 3).sum()


def first_held_by_a_hook(weight: Tensor) -> Tensor:
    twice, later = weight * 2, weight * 3
    later.register_hook(lambda gradient: held.append(gradient * 3))
    return twice.sum() + later.sum()


def first_used_by_another(weight: Tensor) -> Tensor:
    """The gradient of a sum is that of both its terms, and both are used once more."""
    one, other = weight * 2, weight * 3
    return (one + other).sum() + one.sum() + other.sum()


held: list[Tensor] = []


def residual(weight: Tensor) -> Tensor:
    inner = weight * 2
    return ((inner + torch.tanh(inner)) * 3).sum()


USES = (used_twice, first_as_a_view, first_held_by_a_hook, first_used_by_another, residual)


def peak_of_real_tensors(use: Callable[[Tensor], Tensor]) -> int:
    gc.collect()
    meter = AllocationMeter(CPU)
    before = meter.peak_bytes()
    weight = torch.zeros(SIDE, SIDE, requires_grad=True)
    use(weight).backward()
    peak = meter.peak_bytes()
    assert before is not None and peak is not None
    return peak - before


def peak_of_fake_tensors(use: Callable[[Tensor], Tensor]) -> int:
    mode = FakeTensorMode()
    storages = Storages(mode)
    with mode, storages, GradientSums():
        weight = torch.zeros(SIDE, SIDE, requires_grad=True)
        use(weight).backward()
    return max(half.num_bytes for half in storages.peaks_of_halves()["build"].values())


@pytest.mark.parametrize("use", USES)
def test_a_tensor_that_is_used_twice_has_the_peak_of_real_tensors(use):
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    measured = peak_of_real_tensors(use)
    held.clear()
    rehearsed = peak_of_fake_tensors(use)
    held.clear()
    assert abs(measured - rehearsed) <= ELEMENTS_BYTES, (
        measured / MATRIX_BYTES,
        rehearsed / MATRIX_BYTES,
    )


def test_a_tied_embedding_under_autocast_has_the_peak_of_real_ranks(ranks):
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    words = ("strategy=ddp", "strategy.implementation=torch", "precision=autocast")
    config = config_of(*WIDE, *words)
    measured = max(ranks(real_peak, prepared(config, None), world_size=NUM_RANKS))
    assert 0 <= measured - planned(config).num_bytes <= SCRATCH_BYTES
