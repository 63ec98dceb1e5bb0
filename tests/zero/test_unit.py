"""A unit's memory and its transitions: what is freed is gone, what is illegal raises.

Over ranks that do not exist (`fake_world`): the section of rank 0 is real, that of rank 1 is what the memory held.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from zeroexp.comm.collectives import Collectives
from zeroexp.cut.stage import STAGES
from zeroexp.process.world import World, fake_world
from zeroexp.zero.assemble import make_units
from zeroexp.zero.grouping import group_parameters
from zeroexp.zero.held import Residence
from zeroexp.zero.options import Dtypes, Options, settle_options
from zeroexp.zero.unit import Unit
from zeroexp.zero_safety.refusals import Refusals

FP32 = Dtypes(torch.float32, torch.float32, torch.float32)
BF16_MASTER = Dtypes(torch.bfloat16, torch.float32, torch.float32)


@pytest.fixture
def world() -> Iterator[World]:
    with fake_world(0, 2) as world:
        yield world


def make(world: World, stage: str, *, layout: str = "buffer", dtypes: Dtypes = FP32) -> list[Unit]:
    """The units of two linear blocks of 3 x 5 + 5 = 20 elements each, ten for each rank; the root is empty."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(3, 5))
    wire = Collectives(world, transport="gloo")
    options = Options(layout=layout)
    settled = settle_options(options, STAGES[stage], wire.facts, 1)  # a unit is one bucket
    groups = group_parameters(module, ["0", "1"], "block")
    return make_units(groups, STAGES[stage], options, settled, dtypes, wire, Refusals())


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


@pytest.mark.parametrize("layout", ["parameter", "tensor", "buffer"])
def test_a_freed_unit_holds_its_piece_alone(world, layout):
    for unit in make(world, "zero3", layout=layout)[1:]:
        states = unit.states()
        assert bytes_of(states["parameters"]) == sum(4 * c.piece.numel() for c in unit.held)
        assert bytes_of(states["buffers"]) == 0
        assert unit.residence is Residence.FREED


def test_memory_comes_and_goes_with_the_parameters(world):
    unit = make(world, "zero3")[1]
    arrive(unit)
    assert bytes_of(unit.states()["buffers"]) == 128  # 80 bytes, aligned to 64
    unit.free()
    assert bytes_of(unit.states()["buffers"]) == 0


def test_reading_a_freed_parameter_raises(world):
    unit = make(world, "zero3")[1]
    arrive(unit)
    x = torch.ones(2, 3)
    assert nn.functional.linear(x, weight(unit)).shape == (2, 5)
    unit.free()
    assert weight(unit).shape == (5, 3) and weight(unit).numel() == 15
    with pytest.raises(RuntimeError, match=r"parameter 0.weight is freed.*strategy.gathered"):
        nn.functional.linear(x, weight(unit))


def test_own_section_survives_being_freed(world):
    unit = make(world, "zero3")[1]
    mine = unit.held[0].piece.clone()
    for _ in range(2):
        arrive(unit)
        flat = torch.cat([p.detach().reshape(-1) for p in unit.trainable_parameters])
        assert torch.equal(flat[:10], mine)
        unit.free()


def test_bytes_stay_while_somebody_else_holds_a_view(world):
    """To read it ends in no crash, and shows what was gathered; they go once the view is gone."""
    unit = make(world, "zero3")[1]
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


def test_what_autograd_saved_is_right_again_after_gathering(world):
    """Neither freeing nor gathering moves the version counter, and saved views see the new values."""
    unit = make(world, "zero3")[1]
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
    unit = make(world, "zero3")[1]
    unit.gather()
    with pytest.raises(RuntimeError, match="unit 0 is gathering and can not become gathering"):
        unit.gather()
    unit.arrive()
    unit.free()
    unit.free()  # nothing more
    assert unit.residence is Residence.FREED


def test_handing_over_nothing_is_refused(world):
    with pytest.raises(AssertionError, match="no gradient was reduced"):
        make(world, "zero2")[1].hand_over()


# -- gradients and masters --------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "kept"), [("ddp", 20), ("zero1", 20), ("zero2", 10)])
def test_gradients_rest_where_the_stage_says(world, stage, kept):
    """Elements left after reduction: all of them where gradients rest whole, else this rank's half."""
    unit = make(world, stage)[1]
    for parameter in unit.trainable_parameters:
        parameter.grad = torch.ones_like(parameter)
    unit.reduce(unit.buckets[0], last=True).wait()
    assert all(parameter.grad is None for parameter in unit.trainable_parameters)
    assert bytes_of(unit.states()["gradients"]) == 4 * kept
    unit.zero_grad()
    assert bytes_of(unit.states()["gradients"]) == 0


def test_a_missing_gradient_is_zeros():
    """In a world of one, where what is reduced is what this rank has."""
    with fake_world(0, 1) as alone:
        unit = make(alone, "ddp")[1]
        bias = unit.trainable_parameters[1]
        bias.grad = torch.ones_like(bias)
        unit.reduce(unit.buckets[0], last=True).wait()
        gradients = {each.master.shape: each.gradient for each in unit.hand_over()}
        assert unit.gradient_presence() == [False, True]
        assert gradients[torch.Size([5, 3])].tolist() == [[0.0] * 3] * 5
        assert gradients[torch.Size([5])].tolist() == [1.0] * 5


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero3"])
def test_a_master_of_the_same_dtype_costs_nothing(world, stage):
    unit = make(world, stage)[1]
    assert unit.states()["master"] == []
    storage = unit.states()["parameters"][0].untyped_storage()._cdata
    assert {master.untyped_storage()._cdata for _, master in unit.parameters_with_masters()} == {
        storage
    }


def test_a_master_of_another_dtype_is_taken_before_rounding(world):
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(3, 5), nn.Linear(3, 5))[0].weight.detach()
    unit = make(world, "zero3", dtypes=BF16_MASTER)[1]
    ((_, master),) = unit.parameters_with_masters()
    assert master.dtype is torch.float32
    assert torch.equal(master.detach(), exact.reshape(-1)[:10])
    assert unit.held[0].piece.dtype is torch.bfloat16
    assert torch.equal(unit.held[0].piece, exact.reshape(-1)[:10].bfloat16())
    assert bytes_of(unit.states()["master"]) == 40


def test_publishing_casts_masters_into_the_parameters(world):
    unit = make(world, "zero1", dtypes=BF16_MASTER)[1]
    ((_, master),) = unit.parameters_with_masters()
    with torch.no_grad():
        master.fill_(3.0)
    unit.publish()
    unit.arrive()
    assert weight(unit).reshape(-1)[:10].tolist() == [3.0] * 10


def test_a_parameter_owned_whole_keeps_its_shape(world):
    units = make(world, "zero3", layout="parameter")
    shapes = {tuple(master.shape) for unit in units for _, master in unit.parameters_with_masters()}
    assert shapes == {(5, 3), (5,)}  # greedy: one weight and one bias for each of the two ranks
