"""A unit's memory and its transitions: what is freed is gone, what is illegal raises.

Over ranks that do not exist (`fake_world`): the section of rank 0 is real, that of rank 1 is what the memory held.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from zeroexp.comm.collectives import Collectives
from zeroexp.comm.traits import MoveOptions
from zeroexp.cut.stage import STAGES
from zeroexp.process.world import World, fake_world
from zeroexp.zero.assemble import make_units
from zeroexp.zero.grouping import group_parameters
from zeroexp.zero.held import GatherState
from zeroexp.zero.options import Dtypes, Options
from zeroexp.zero.unit import Unit
from zeroexp.zero_safety.refusals import Refusals

FP32 = Dtypes(torch.float32, torch.float32, torch.float32)


@pytest.fixture
def world() -> Iterator[World]:
    with fake_world(0, 2) as world:
        yield world


def make(world: World) -> Unit:
    """The first of two linear blocks of 3 x 5 + 5 = 20 elements each, ten for each rank, under ZeRO-3."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(3, 5))
    wire = Collectives(world, MoveOptions(transport="gloo"))
    options, stage = Options(), STAGES["zero3"]
    options = options.resolved(stage, wire.traits, 1)  # a unit is one bucket
    groups = group_parameters(module, ["0", "1"], "block")
    return make_units(groups, stage, options, FP32, wire, Refusals())[1]


def arrive(unit: Unit) -> None:
    unit.gather()
    unit.arrive()


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(
        s.nbytes()
        for s in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values()
    )


def weight(unit: Unit) -> nn.Parameter:
    return unit.trainable_parameters[0]


# -- what is freed is gone -------------------------------------------------------------------------


def test_memory_comes_and_goes_with_the_parameters(world):
    unit = make(world)
    arrive(unit)
    assert bytes_of(unit.states()["buffers"]) == 128  # 80 bytes, aligned to 64
    unit.free()
    assert bytes_of(unit.states()["buffers"]) == 0


def test_reading_a_freed_parameter_raises(world):
    unit = make(world)
    arrive(unit)
    x = torch.ones(2, 3)
    assert nn.functional.linear(x, weight(unit)).shape == (2, 5)
    unit.free()
    assert weight(unit).shape == (5, 3) and weight(unit).numel() == 15
    assert weight(unit).stride() == (3, 1) and weight(unit).stride(0) == 3
    with pytest.raises(RuntimeError, match=r"parameter 0.weight is freed.*strategy.gathered"):
        nn.functional.linear(x, weight(unit))


def test_bytes_stay_while_somebody_else_holds_a_view(world):
    """To read it ends in no crash, and shows what was gathered; they go once the view is gone."""
    unit = make(world)
    arrive(unit)
    unit.held[0].full.fill_(2.0)
    kept = weight(unit).detach()[0]
    unit.free()
    assert (
        unit.full is not None and unit.full.is_viewed and bytes_of(unit.states()["buffers"]) == 128
    )
    assert kept.tolist() == [2.0] * 3
    del kept
    assert not unit.full.is_viewed
    unit.full.drop()
    assert bytes_of(unit.states()["buffers"]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_view_as_another_dtype_is_of_the_same_memory(world, dtype):
    """As where a module shows its weights as complex numbers, and autograd saves these."""
    unit = make(world)
    arrive(unit)
    assert unit.full is not None
    shown, weights = unit.full.view(dtype, [2, 2], [5, 1], 1), unit.trainable[0].whole
    assert shown.equal(weights.view(dtype)[1:11].view(2, 5)[:, :2])
    assert shown.data_ptr() == weights.data_ptr() + 4


def test_what_autograd_saved_is_right_again_after_gathering(world):
    """Neither freeing nor gathering moves the version counter, and saved views see the new values."""
    unit = make(world)
    arrive(unit)
    unit.held[0].full.fill_(2.0)
    x = torch.ones(1, 3, requires_grad=True)
    y = nn.functional.linear(x, weight(unit)).sum()
    version = weight(unit)._version
    unit.free()
    arrive(unit)
    unit.held[0].full.fill_(2.0)
    assert weight(unit)._version == version
    y.backward()
    assert x.grad.tolist() == [[10.0] * 3]  # 5 rows of 2


# -- illegal transitions ---------------------------------------------------------------------------


def test_illegal_transitions_raise(world):
    unit = make(world)
    unit.gather()
    with pytest.raises(RuntimeError, match="unit 0 is gathering and can not become gathering"):
        unit.gather()
    unit.arrive()
    unit.free()
    unit.free()  # nothing more
    assert unit.gather_state is GatherState.FREED
