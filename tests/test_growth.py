"""What `python -m benchmarks.growth` has to find is found: objects that stay, and a buffer that grows with layers."""

from __future__ import annotations

import pytest

from benchmarks import growth
from benchmarks.growth import Size, costs_of, growth_of, objects_a_step, too_steep
from zeroexp.comm.collectives import Collectives
from zeroexp.engines.sharded import Sharded
from zeroexp.measure.memory import count_cpu_allocations

LAYERS = [4, 8, 16]


@pytest.fixture
def planting(monkeypatch):
    """Whatever is planted goes at the end of the test."""
    for owner, name in ((Sharded, "step"), (Sharded, "zero_grad"), (Collectives, "all_gather")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return growth.plant


def growth_with_layers(engine: str) -> dict[str, growth.Growth]:
    costs = [costs_of(engine, Size(layers=layers)) for layers in LAYERS]
    return {cost: growth_of(LAYERS, [each[cost] for each in costs]) for cost in costs[0]}


@pytest.mark.slow
def test_a_buffer_that_grows_with_layers_is_found(planting):
    assert count_cpu_allocations() is None
    theirs, mine = growth_with_layers("fsdp2"), growth_with_layers("zero3_buffer")
    found = list(too_steep("layers", "zero3_buffer", mine, theirs))
    assert [line for line in found if "milliseconds" not in line] == [], "time is a machine's"
    planting("buffer")
    found = list(too_steep("layers", "zero3_buffer", growth_with_layers("zero3_buffer"), theirs))
    assert any("bytes for one more of layers" in line for line in found)


def test_objects_that_stay_after_a_step_are_found(planting):
    assert objects_a_step("zero3_buffer", num_steps=50) < growth.MOST_OBJECTS
    planting("leak")
    assert 9.5 < objects_a_step("zero3_buffer", num_steps=50) < 10.5


def test_time_of_a_larger_exponent_is_found():
    sizes = [8, 32, 128]
    linear, square = (growth_of(sizes, [float(n**e) for n in sizes]) for e in (1, 2))
    theirs = dict.fromkeys(["milliseconds", "operations", "bytes"], linear)
    (found,) = too_steep("layers", "mine", {**theirs, "milliseconds": square}, theirs)
    assert found == "mine: milliseconds grow as layers^2.00, FSDP2's as layers^1.00"
    assert list(too_steep("layers", "mine", theirs, theirs)) == []


def test_an_exponent_and_its_interval():
    grown = growth_of([10, 100, 1000], [30.0, 3000.0, 300_000.0])
    assert grown.exponent == pytest.approx(2)
    assert grown.interval == pytest.approx((2, 2))
    assert grown.rise == pytest.approx(297_000 / 900)
    low, high = growth_of([10, 100, 1000], [30.0, 250.0, 3000.0]).interval
    assert low < 1 < high
