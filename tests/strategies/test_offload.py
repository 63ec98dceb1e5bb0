"""Optimizer state on the host, or in files: what the allocator counts there, checkpoints to and fro, refusals.

Parity is in test_parity.py, bytes of every moment and of the bus in tests/plan, the order of copies in
tests/zero/test_device_order.py.
"""

from __future__ import annotations

import gc
import os
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise, product
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.composing import composed
from tests.crossed import crossed, every_nth
from tests.models_for_tests import MODELS
from tests.optimizers_for_tests import CountingAverage
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
from zeroexp.check.sweep_points import point_of
from zeroexp.check.try_points import try_points
from zeroexp.cluster.fits_memory import refuse_full_disks
from zeroexp.comm.offload_file import MappedFile
from zeroexp.cut.chunk import FROZEN, Chunk, Member
from zeroexp.cut.layout import place_on_host
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.canonical import merge
from zeroexp.measure.memory import AllocationMeter, bytes_by_kind, count_cpu_allocations
from zeroexp.process import world as worlds
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Dtypes, Options

ON_HOST, ALL_ON_HOST = Options(offload="optimizer"), Options(offload="all")
PART = replace(ON_HOST, offload_fraction=0.4)
PART_OF_ALL = replace(ALL_ON_HOST, offload_fraction=0.4)
IN_FILES = replace(ALL_ON_HOST, offload_folder=gettempdir())
EACH = [ON_HOST, ALL_ON_HOST, PART, PART_OF_ALL, IN_FILES]
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


# Each is left once and taken up once.
ENGINES = [Ours("zero1", Options(layout="tensor")), *(Ours("zero3", options) for options in EACH)]


@every_nth(2, "first, last", pairwise([*ENGINES, ENGINES[0]]))
def test_a_checkpoint_goes_on_with_and_without_it(ranks, first, last):
    assert_same(outcome_of(ranks(goes_on, first, last)), train_oracle(Recipe()))


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


@pytest.mark.parametrize(
    ("precision", "options"), list(zip(["fp32", "bf16_master"] * 3, EACH, strict=False))
)
def test_what_is_written_into_parameters_reaches_the_host(ranks, precision, options):
    answers = ranks(written, precision, options)
    assert all((piece == 0.5).all() for pieces in answers for piece in pieces)


def test_a_part_of_one_chunk_is_refused():
    words = ("model=tiny", "strategy.offload=optimizer", "strategy.offload_fraction=0.5")
    for unit, refused in (("model", "each of 1 chunks would be there"), ("block", None)):
        (line,) = try_points([composed(*words, f"strategy.unit={unit}")])
        assert line is None if refused is None else refused in str(line)


# -- a part of it ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["", "matrix", FROZEN]), min_size=1, max_size=9),
    sizes=st.lists(st.integers(1, 40), min_size=9, max_size=9),
    share=st.sampled_from([0.01, 0.3, 0.5, 0.9, 1.0]),
    frozen=st.booleans(),
)
def test_the_share_is_there_of_each_beginning_of_the_model(kinds, sizes, share, frozen):
    chunks = [
        Chunk((Member(f"p{index}", 0, size),), (0, size), kind)
        for index, (kind, size) in enumerate(zip(kinds, sizes, strict=False))
    ]
    placed = [chunk for (chunk,) in place_on_host([(c,) for c in chunks], share, frozen=frozen)]
    assert [replace(chunk, on_host=False) for chunk in placed] == chunks
    moved = [chunk for chunk in placed if frozen or chunk.kind != FROZEN]
    assert not any(chunk.on_host for chunk in placed if chunk not in moved)
    total = there = 0
    for chunk in moved:
        total += chunk.unpadded_numel
        assert chunk.on_host is (there < share * total), "only while the share is not reached"
        there += chunk.on_host * chunk.unpadded_numel
        assert share * total <= there


QUICK = [(1, "buffer"), (2, "tensor")]


class CountsLater(CountingAverage):
    """Has a number in its groups that its first step makes, and one of its own; it decays by both."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.num_steps = self.num_steps + 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.mul_(1 - 0.01 / group["steps"] / self.num_steps)


def in_three_groups(world: World, options: Options) -> tuple[Any, Any, list[Any]]:
    """Tied, frozen, unused and odd parameters, three groups of rates, a clip, three microbatches."""
    built = MODELS["toy"].build()
    trained = [p for p in built.module.parameters() if p.requires_grad]
    rates = zip((trained[:1], trained[1:8], trained[8:]), (0.1, 0.02, 0.3), strict=True)
    engine = Sharded(
        built.module,
        blocks=built.blocks,
        stage=STAGES["zero3"],
        param_groups=[{"params": params, "lr": lr} for params, lr in rates],
        optimizer_factory=CountsLater,
        world=world,
        max_grad_norm=0.1,
        options=options,
    )
    outcome = run_steps(engine, world, Recipe(world_size=world.size, accumulation=3), range(3))
    held = bytes_by_kind(engine.model_states())
    counted = [(group["k"], group["steps"]) for group in engine.optimizer.param_groups]
    counted.append(engine.optimizer.num_steps)
    return outcome, pieces_of(engine), [counted, held]


@crossed(
    "world_size, layout",
    [1, 2, 3],
    ["parameter", "tensor", "buffer"],
    quick=lambda world_size, layout: (world_size, layout) in QUICK,
)
def test_whatever_part_rests_there_the_same_is_trained(ranks, layout, world_size):
    def trained(**options: Any) -> tuple[Any, list[Any]]:
        each = Options(layout=layout, **options)
        answers = ranks(in_three_groups, each, world_size=world_size)
        return outcome_of([answer[:2] for answer in answers]), [answer[2] for answer in answers]

    expected, _ = trained(transport="gloo")
    # By pairs: what, how much of it, and in files or not.
    for offload, fraction in product(("optimizer", "all"), (0.3, 1.0)):
        folder = gettempdir() if (offload == "all") == (fraction == 0.3) else None
        where = {"offload_fraction": fraction, "offload_folder": folder}
        outcome, found = trained(offload=offload, **where)
        assert_same(outcome, expected)
        for counted, held in found:
            assert counted == [*[(3, 3)] * 3, 3]
            assert (held["optimizer"] == 0) == (fraction == 1)
            assert ("files" in held) == (folder is not None)


# -- in files --------------------------------------------------------------------------------------


def in_a_file(world: World, folder: str) -> tuple[dict[str, int], list[str]]:
    """What a rank holds before and after the optimizer has made its moments, and the names in the folder."""
    options = replace(ON_HOST, layout="tensor", offload_folder=folder)
    recipe = Recipe(world_size=world.size, moments="int8", model="large")
    engine: Any = build_on_rank(world, recipe, Ours("zero3", options))
    before = bytes_by_kind(engine.model_states())
    run_steps(engine, world, recipe, range(2))
    after = bytes_by_kind(engine.model_states())
    masters = 4 * sum(m.numel() for unit in engine.units for _, m in unit.parameters_with_masters())
    assert before["files"] == masters
    state = engine.optimizer.state.values()
    moments = [moment for own in state for moment in own.values() if moment.ndim]
    assert after["files"] == masters + sum(moment.nbytes for moment in moments)
    # The transit of gradients is as large, and an optimizer may read the number of steps.
    assert after["host"] == masters + 4 * len(state)
    assert after["files"] <= after["resident"] <= after["files"] + 4096 * 2 * len(moments)
    run_steps(engine, world, recipe, range(2, 3))  # moments are coded anew, in their place
    assert bytes_by_kind(engine.model_states())["files"] == after["files"]
    return after, os.listdir(folder)


def test_masters_and_moments_lie_in_files_without_a_name(ranks, tmp_path):
    for held, names in ranks(in_a_file, str(tmp_path)):
        assert held["master"] == held["optimizer"] == 0
        assert names == []


def test_a_disk_without_room_is_told_in_one_line(tmp_path):
    file = MappedFile(str(tmp_path))
    with pytest.raises(ValueError, match=r"options.offload_folder=.*; use a folder on a disk with"):
        file.take(1 << 60)
    assert file.take(8).sum() == 0  # and the file goes on
    with pytest.raises(ValueError, match="No such file or directory"):
        MappedFile(str(tmp_path / "none"))


def test_files_that_the_disk_can_not_take_are_refused_before_a_rank_starts(tmp_path, monkeypatch):
    """Those of 223,552 masters, to the byte."""
    sgd = ("optimizer=sgd", "optimizer.momentum=0")
    words = ("model=tiny", "strategy=zero1", "strategy.offload=optimizer", *sgd)
    config = composed(*words, f"strategy.offload_folder={tmp_path}")
    points = [point_of([], asdict(config))]
    for free, is_refused in ((4 * 223_552, False), (4 * 223_552 - 1, True)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("zeroexp.cluster.fits_memory.shutil.disk_usage", lambda _, u=usage: u)
        (point,) = refuse_full_disks(points)
        line = (
            "0.9 MiB are free, and the files of all ranks take 0.9 MiB; use a disk with more room"
        )
        line = f"strategy.offload_folder={tmp_path}: {line}"
        assert point.refusal == (line if is_refused else None)


def norm_with_masters_in_float64(world: World, share: float) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    strategy = Sharded(
        model,
        blocks=["0", "1"],
        stage=STAGES["zero3"],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=partial(torch.optim.SGD, lr=0.1),
        dtypes=Dtypes(torch.float32, torch.float32, torch.float64),
        world=world,
        options=Options(offload="optimizer", offload_fraction=share),
    )
    with strategy.microbatch(last=True):
        strategy.backward(strategy.model(torch.ones(2, 5)).square().sum())
    return strategy.step().item()


def test_gradients_of_two_dtypes_have_one_norm(ranks):
    """Those for the host keep the dtype of reduction, the others have that of their master."""
    parts, whole = (ranks(norm_with_masters_in_float64, share) for share in (0.5, 1.0))
    assert parts == pytest.approx(whole)
