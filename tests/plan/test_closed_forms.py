"""Closed forms against the engine: every byte it counts and every byte it holds, at any number of ranks.

The engine runs for real over a process group that moves nothing (`fake`): what it asks to be sent does not depend on
values. `test_collectives.py` shows that what it counts is what goes over the wire, test_planned_peak.py and
test_gathers.py have real peers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.composing import composed
from tests.crossed import crossed
from tests.plan.real_steps import one_step
from zeroexp.cut.codec_bytes import CODE_BITS
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.measure.record import MOMENTS, Traffic
from zeroexp.plan.form_of_config import build_on_meta
from zeroexp.plan.form_of_config import form_of as form_of_config
from zeroexp.plan.form_terms import OptimizerForm, PrecisionForm
from zeroexp.plan.outcome import plan_point, planned_ranks
from zeroexp.plan.sent_bytes import EngineForm
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import DTYPES, MIB, Dtypes, Options, OuterOptimizer

NUM_BLOCKS = 4
WORDS = 11


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Odd sizes, a tied embedding, one frozen parameter in every place where one may be."""

    def __init__(self, width: int = 5):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.tokens.weight
        self.norm.bias.requires_grad_(False)
        self.blocks[1].up.bias.requires_grad_(False)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


OPTIMIZERS = {
    "adamw": (lambda groups: torch.optim.AdamW(groups, fused=False), OptimizerForm(2, 4)),
    "momentum": (lambda groups: torch.optim.SGD(groups, 1e-3, momentum=0.9), OptimizerForm(1, 0)),
    "sgd": (lambda groups: torch.optim.SGD(groups, 1e-3), OptimizerForm(0, 0)),
}
PRECISIONS = [
    PrecisionForm("float32", "float32", "float32"),
    PrecisionForm("bfloat16", "bfloat16", "bfloat16"),
    PrecisionForm("bfloat16", "float32", "float32"),
    PrecisionForm("bfloat16", "bfloat16", "float32"),
]


def engine(world: World, stage: str, options: Options, precision: PrecisionForm, optimizer: str):
    model = Model()
    return Sharded(
        model,
        blocks=[f"blocks.{i}" for i in range(NUM_BLOCKS)],
        stage=STAGES[stage],
        param_groups=[{"params": [p for p in model.parameters() if p.requires_grad]}],
        optimizer_factory=OPTIMIZERS[optimizer][0],
        world=world,
        dtypes=Dtypes(
            *(DTYPES[d] for d in (precision.compute, precision.reduce, precision.master))
        ),
        options=options,
    )


def form_of(
    strategy: Sharded,
    stage: str,
    options: Options,
    accumulation: int,
    precision: PrecisionForm = PRECISIONS[0],
    optimizer: str = "sgd",
) -> EngineForm:
    """Built as a planner builds it, from the layouts of the units."""
    units = [tuple(tensors.fine for tensors in unit.held) for unit in strategy.units]
    size, transport = strategy.wire.world.size, options.transport
    row = options.stage_for(STAGES[stage], size)
    return EngineForm(
        *(units, row, options, transport),
        world_size=size,
        accumulation=accumulation,
        precision=precision,
        optimizer=OPTIMIZERS[optimizer][1],
    )


def run_step(
    strategy: Sharded, accumulation: int, held: dict | None = None, *, drain: bool = False
) -> Traffic:
    """One optimizer step; with `held`, nothing is gathered ahead."""
    ids = torch.zeros(1, 3, dtype=torch.long)
    one_step(strategy, ids, accumulation, held, drain=drain or held is not None)
    return strategy.wire.take_traffic()


def check_step(strategy: Sharded, form: EngineForm, accumulation: int) -> None:
    rank = strategy.wire.world.rank
    run_step(strategy, accumulation)
    for _ in range(2):
        assert run_step(strategy, accumulation) == form.traffic(rank)
    held = {}
    run_step(strategy, accumulation, held)
    assert held == {moment: form.held_bytes(moment, rank) for moment in MOMENTS}


@st.composite
def situations(draw):
    # zero3 has most schedules.
    stage = draw(st.sampled_from([*STAGES, "zero3", "zero3"]))
    world_size = draw(st.sampled_from([1, 2, 3, 4, 6, 7, 8]))
    groups = [1] if stage == "ddp" else [k for k in (1, 2, 3) if world_size in (2 * k, 3 * k)]
    codecs = st.sampled_from([None, None, *CODE_BITS])
    is_sharded = stage == "zero3" and world_size > 1
    replicas = draw(st.sampled_from(groups or [1]))
    shards = world_size // replicas
    nodes = [n for n in range(2, shards) if shards % n == 0] if is_sharded else []
    secondary = draw(st.sampled_from([None, *nodes]))
    gather_codec = draw(codecs) if stage == "zero3" else None
    masters_rest = is_sharded and shards > 1 and draw(st.booleans())
    offloads = ["all"] if stage == "zero3" and secondary is None and not masters_rest else []
    are_cast = masters_rest and gather_codec is None
    offload = None if are_cast else draw(st.sampled_from([None, "optimizer", *offloads]))
    in_part = offload is not None and not masters_rest
    reduce_codec = draw(codecs) if stage in ("zero1", "zero2", "zero3") else None
    options = Options(
        layout=draw(st.sampled_from(["parameter", "tensor", "buffer"])),
        owners=draw(st.sampled_from(["contiguous", "greedy"])),
        unit=draw(st.sampled_from(["model", "block", "layer", "module"])),
        overlap=draw(st.booleans()),
        prefetch=draw(st.integers(0, NUM_BLOCKS)),
        keep=draw(st.sampled_from(["none", "last", "all"])),
        reduce_each="step" if stage == "zero1" else draw(st.sampled_from(["step", "microbatch"])),
        bucket_mb=draw(st.sampled_from([None, 40 / MIB, 500 / MIB])),
        transport=draw(st.sampled_from(["gloo", "native"])),
        replicas=replicas,
        secondary_partition=secondary,
        gather_codec=gather_codec,
        masters_rest=masters_rest,
        reduce_codec=reduce_codec,
        error_feedback=reduce_codec is not None and draw(st.booleans()),
        offload=offload,
        offload_fraction=draw(st.sampled_from([1.0, 0.3, 0.6])) if in_part else 1.0,
        offload_folder=draw(st.sampled_from([None, "."])) if in_part else None,
    )
    if options.replicas > 1 and options.offload is None and draw(st.booleans()):
        # A replica of one rank has no nodes, and sends no codes.
        is_alone = draw(st.booleans()) and not (masters_rest or secondary)
        alone = world_size if is_alone else options.replicas
        outer = draw(st.sampled_from([OuterOptimizer(1), OuterOptimizer(1, lr=1.0, momentum=0.0)]))
        options = replace(options, outer=outer, replicas=alone)
    elif options.replicas > 1 and options.offload != "all" and not masters_rest:
        options = replace(options, optimizer_over=draw(st.sampled_from(["group", "all"])))
    if stage == "zero1_allreduce" and options.outer is None:
        options = replace(options, replicas=1, optimizer_over="group")
    accumulation = draw(st.integers(1, 3))
    rank = draw(st.integers(0, world_size - 1))
    precision = draw(st.sampled_from(PRECISIONS))
    return stage, rank, world_size, options, accumulation, precision


LAYOUTS = ["parameter", "tensor", "buffer"]
OF_ALL_RANKS = ["zero1", "zero2", "zero3"]
DRAWN = given(situation=situations(), optimizer=st.sampled_from(list(OPTIMIZERS)))


@settings(max_examples=40, deadline=None, derandomize=True)
@DRAWN
def test_bytes_and_calls_of_a_step_and_bytes_held_at_every_named_moment(situation, optimizer):
    check_situation(situation, optimizer)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@DRAWN
def test_they_are_those_of_many_more_situations(situation, optimizer):
    check_situation(situation, optimizer)


def check_situation(situation, optimizer):
    stage, rank, world_size, options, accumulation, precision = situation
    with fake_world(rank, world_size) as world:
        strategy = engine(world, stage, options, precision, optimizer)
        form = form_of(strategy, stage, options, accumulation, precision, optimizer)
        check_step(strategy, form, accumulation)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(situation=situations())
def test_ranks_that_are_planned_as_one_are_alike(situation):
    """Pieces of one size that lie in unlike buckets, as of whole parameters, are not."""
    stage, _, world_size, options, accumulation, precision = situation
    options = replace(options, transport="native")
    with fake_world(0, world_size) as world:
        strategy = engine(world, stage, options, precision, "adamw")
        form = form_of(strategy, stage, options, accumulation, precision, "adamw")
    apart = [form.traffic(rank).bytes_by_kind for rank in range(world_size)]
    assert [each.sent for each in planned_ranks(form)] == apart


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_what_rests_beside_padding_is_the_model(stage, layout):
    """Five ranks of odd sizes: one model on each of them, or cut over all of them."""
    options = Options(layout=layout, transport="native")
    with fake_world(0, 5) as world:
        strategy = engine(world, stage, options, PRECISIONS[0], "sgd")
        form = form_of(strategy, stage, options, 1)
    real = [form.held_bytes("at_rest", r)["parameters"] - form.padding_bytes(r) for r in range(5)]
    model_bytes = sum(p.nbytes for p in Model().parameters())
    assert sum(real) == (1 if stage == "zero3" else 5) * model_bytes


@crossed(
    "stage, layout, transport",
    OF_ALL_RANKS,
    LAYOUTS,
    ["gloo", "native"],
    quick=lambda stage, layout, transport: (
        (OF_ALL_RANKS.index(stage) + LAYOUTS.index(layout)) % 2 == (transport == "native")
    ),
)
def test_uneven_shares_of_an_optimizer_over_all_ranks(stage, layout, transport):
    """Odd sizes, so that replicas update unlike shares of a piece, or of a bucket none."""
    for size in (None, 40 / MIB):
        words = {"layout": layout, "transport": transport, "bucket_mb": size, "prefetch": 0}
        more = {"keep": "none", "reduce_each": "step", "replicas": 2, "optimizer_over": "all"}
        options = Options(**words, **more)
        with fake_world(3, 4) as world:
            strategy = engine(world, stage, options, PRECISIONS[2], "adamw")
            form = form_of(strategy, stage, options, 1, PRECISIONS[2], "adamw")
            check_step(strategy, form, 1)


@pytest.mark.parametrize("keep", ["none", "last", "all"])
def test_the_steps_between_two_that_drain_send_as_much_as_others(keep):
    """A step that drains gathers nothing ahead, which would be freed at once; the next step gathers it then."""
    num_steps = 3
    with fake_world(1, 2) as world:
        for prefetch in (0, 1, NUM_BLOCKS):
            options = Options(keep=keep, prefetch=prefetch, transport="gloo", reduce_each="step")
            strategy = engine(world, "zero3", options, PRECISIONS[0], "sgd")
            form = form_of(strategy, "zero3", options, 2)
            run_step(strategy, 2)
            run_step(strategy, 2, drain=True)
            sent = Counter[str]()
            for step in range(num_steps):
                last = step == num_steps - 1
                sent.update(run_step(strategy, 2, drain=last).bytes_by_kind)
            expected = form.traffic(1).bytes_by_kind
            assert sent == {kind: num_steps * size for kind, size in expected.items()}, prefetch


@pytest.mark.parametrize("transport", ["gloo", "native"])
@pytest.mark.parametrize("family", ["tensor", "buffer"])
@pytest.mark.parametrize(
    ("stage", "times"),
    [("ddp", 2), ("zero1_allreduce", 3), ("zero1", 2), ("zero2", 2), ("zero3", 3)],
)
def test_plain_schedule_is_the_table(stage, times, family, transport):
    """Nothing kept, one microbatch, even cuts: `times` x P x (N-1)/N on every rank."""
    words = ("model=mlp_tiny", "data=vectors", "world_size=4", "data.global_batch_size=4")
    config = composed(*words, f"strategy={stage}", f"strategy.implementation={family}")
    config.strategy.keep = "none" if stage == "zero3" else None
    model = build_on_meta(config)
    form = form_of_config(config, model, transport)
    parameter_bytes = sum(p.nbytes for p in model.module.parameters())
    for rank in range(4):
        sent = dict(form.traffic(rank).bytes_by_kind)
        sent.pop("norm")  # the form's own kind
        assert sum(sent.values()) == times * parameter_bytes * 3 // 4


def test_groups_move_what_travels_between_nodes():
    """Eight ranks, two a node, in four groups of two: between nodes 2 P 7/8 · 1/2 of a ring become 2 P/2 · 3/4."""
    words = ("model=mlp_tiny", "data=vectors", "world_size=8", "data.global_batch_size=8")
    place = ("strategy=zero1", "cluster=slurm", "cluster.slurm.ranks_per_node=2")
    plain, grouped = (
        plan_point(composed(*words, *place, f"strategy.replicas={k}"), None, "cuda").outcome
        for k in (1, 4)
    )
    parameter_bytes = 4 * sum(plain.owned.per_rank)  # fp32
    assert plain.sent_between == pytest.approx(2 * parameter_bytes * 7 / 8 / 2, rel=0.01)
    assert grouped.sent_between == pytest.approx(2 * parameter_bytes / 2 * 3 / 4, rel=0.01)
    assert grouped.sent.mean == pytest.approx(plain.sent.mean, rel=0.01)
