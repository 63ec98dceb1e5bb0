"""Optimizer state on the host: what the allocator counts there, checkpoints from and to the device, refusals.

Parity is in test_parity.py, bytes of every moment and of the bus in tests/plan, the order of copies in
tests/zero/test_device_order.py.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.composing import composed
from tests.oracle import (
    Recipe,
    assert_same,
    build_on_rank,
    outcome_of,
    pieces_of,
    run_steps,
    train_oracle,
)
from tests.strategies.engine import Ours
from zeroexp.check import check
from zeroexp.config.keys import UndefinedCombination
from zeroexp.interface.canonical import merge
from zeroexp.measure.memory import AllocationMeter, bytes_by_kind, count_cpu_allocations
from zeroexp.process import world as worlds
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Options

ON_HOST, ALL_ON_HOST = Options(offload="optimizer"), Options(offload="all")
SCALAR_BYTES = 16  # of the clip's scale on the host


@pytest.mark.parametrize("offload", ["optimizer", "all"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_master", "paper16"])
def test_what_is_allocated_on_the_host_is_what_the_engine_says(precision, offload):
    """At the update, with gradients in the master's dtype where the reduction's is another one."""
    count_cpu_allocations()
    recipe = Recipe(precision=precision, fused=True, max_grad_norm=0.1)
    gc.collect()
    before = AllocationMeter(torch.device("cpu")).host_peak_bytes() or 0
    with fake_world(0, 2) as world:
        engine: Any = build_on_rank(world, recipe, Ours("zero3", Options(offload=offload)))
        run_steps(engine, world, recipe, range(1))
        meter = AllocationMeter(torch.device("cpu"))
        run_steps(engine, world, recipe, range(1, 2))
        held = bytes_by_kind(engine.model_states())
    owned = sum(m.numel() for unit in engine.units for _, m in unit.parameters_with_masters())
    casts = 4 * owned if precision == "paper16" else 0
    assert held["master"] == held["optimizer"] == 0
    assert (held["parameters"] == 0) == (offload == "all")
    # Masters, two moments, and the transit of gradients; pieces and steps come on top.
    assert held["host"] >= owned * (4 + 8 + (2 if precision == "paper16" else 4))
    peak = meter.host_peak_bytes() or 0
    assert 0 <= peak - before - held["host"] - casts <= SCALAR_BYTES


def goes_on(world: World, first: Ours, last: Ours) -> tuple[Any, Any]:
    """Two steps under one engine, a third under the other one."""
    recipe = Recipe(world_size=world.size)
    one = build_on_rank(world, recipe, first)
    outcome = run_steps(one, world, recipe, range(2))
    two = build_on_rank(world, recipe, last)
    two.load_state_dict(merge(worlds.gather_objects(pieces_of(one))))
    more = run_steps(two, world, recipe, range(2, 3))
    both = replace(outcome, losses=outcome.losses + more.losses, norms=outcome.norms + more.norms)
    return both, pieces_of(two)


@pytest.mark.parametrize("options", [ON_HOST, ALL_ON_HOST])
@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_goes_on_with_and_without_it(ranks, first, options):
    offloads, plain = Ours("zero3", options), Ours("zero1", Options(layout="tensor"))
    pair = (offloads, plain) if first else (plain, offloads)
    assert_same(outcome_of(ranks(goes_on, *pair)), train_oracle(Recipe()))


def written(world: World, precision: str, options: Options) -> list[torch.Tensor]:
    recipe = Recipe(world_size=world.size, precision=precision)
    engine: Any = build_on_rank(world, recipe, Ours("zero3", options))
    run_steps(engine, world, recipe, range(1))
    with engine.gathered(write=True), torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(0.5)
    with engine.gathered():
        assert all((parameter == 0.5).all() for parameter in engine.model.parameters())
    return [
        piece.tensor for entry in pieces_of(engine).values() for piece in entry["weight"].pieces
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
@pytest.mark.parametrize("options", [ON_HOST, ALL_ON_HOST])
def test_what_is_written_into_parameters_reaches_the_host(ranks, precision, options):
    answers = ranks(written, precision, options)
    assert all((piece == 0.5).all() for pieces in answers for piece in pieces)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("strategy.offload=all", "whose parameters rest whole; use optimizer, or leave it out"),
        ("optimizer=muon", "multiplies matrices, for which a host takes too long; leave it null"),
    ],
)
def test_what_can_not_have_it_is_refused(word, line):
    with pytest.raises(UndefinedCombination, match=rf"strategy\.offload=.*{line}"):
        check(composed("world_size=2", "strategy=zero2", "strategy.offload=optimizer", word))


@pytest.mark.parametrize(
    ("options", "optimizer", "line"),
    [
        (Options(offload="cpu"), "adamw", "use optimizer, all, None"),
        (ALL_ON_HOST, "adamw", "use optimizer, or zero3 on two ranks"),
        (ON_HOST, "muon", "whose pieces would travel from host to host; leave it None"),
    ],
)
def test_the_library_refuses_it_in_one_line(options, optimizer, line):
    recipe = Recipe(optimizer=optimizer)
    with fake_world(0, 2) as world, pytest.raises(ValueError, match=line):
        build_on_rank(world, recipe, Ours("zero2", options))
