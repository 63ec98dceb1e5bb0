"""A rehearsal agrees to the byte with the closed forms and with real runs, in every stage, layout and unit.

The real runs are ranks of the same fake world with real tensors on the CPU, whose allocator counts every byte.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from tests.composing import composed
from zeroexp.config.families import MODELS
from zeroexp.config.keys import Config, ConfigError, ModelConfig
from zeroexp.config.optimizer import OPTIMIZERS, OptimizerKind
from zeroexp.data import Microbatch
from zeroexp.engines.build import build_strategy
from zeroexp.measure.instruments import Instruments
from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.measure.record import StepRecord
from zeroexp.models.checkpointing import checkpoint_as_configured
from zeroexp.models.mlp import build as build_mlp
from zeroexp.models.module import build_model
from zeroexp.plan.closed_forms import ShardedForm
from zeroexp.plan.extrapolate_depth import depth_of, measure_at_depth, with_depth
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.rehearse import (
    UNDISTURBED_STEP,
    RehearsedRank,
    prepared,
    rehearse,
    rehearse_rank,
)
from zeroexp.plan.stand_ins import NoData
from zeroexp.process.world import fake_world, joined_process_group
from zeroexp.training.loop import Data, train

CPU = torch.device("cpu")
NUM_RANKS = 4
MLP = ("model=mlp_tiny", "data=vectors", "data.seq_len=16")
LLAMA = ("model=tiny", "data=synthetic", "data.seq_len=64")
STAGES = ("ddp", "zero1_allreduce", "zero1", "zero2", "zero3")
LAYOUTS = ("parameter", "tensor", "buffer")
UNITS = ("model", "block", "module")
RNG_STATE_BYTES = 5056  # activation checkpointing keeps the CPU generator's state for each block
FSDP2_BYTES = 64  # of torch's engines, tensors of one element are the only ones that differ


def config_of(*words: str) -> Config:
    # Two microbatches of one sample for each rank.
    batch = (f"world_size={NUM_RANKS}", f"data.global_batch_size={2 * NUM_RANKS}")
    return composed(*batch, "data.micro_batch_size=1", *words)


def agree(rehearsed: RehearsedRank, expected: ShardedForm) -> None:
    for moment, held in rehearsed.held_bytes.items():
        assert held == expected.held_bytes(moment, rehearsed.rank), moment
    of_form = expected.traffic(rehearsed.rank)
    sent, calls = dict(rehearsed.traffic.bytes_by_kind), dict(rehearsed.traffic.calls_by_kind)
    del sent["loss"], calls["loss"]
    assert (sent, calls) == (of_form.bytes_by_kind, of_form.calls_by_kind)


def points() -> list[object]:
    """All points; the quick ones hold every stage, and every layout twice or once. Real ranks of every stage and layout
    are compared with the closed forms in test_closed_forms.py.
    """
    found: list[object] = []
    for words, *point in itertools.product((MLP, LLAMA), STAGES, LAYOUTS, UNITS):
        stage, layout, _ = point
        in_turn = (STAGES.index(stage) - LAYOUTS.index(layout)) % 3 == 0
        quick = words is MLP and "block" in point and in_turn
        marks = () if quick else pytest.mark.slow
        found.append(pytest.param(words, *point, id="-".join([words[0], *point]), marks=marks))
    return found


@pytest.mark.parametrize(("words", "stage", "layout", "unit"), points())
def test_states_and_traffic_are_those_of_the_closed_forms(words, stage, layout, unit):
    chosen = (f"strategy={stage}", f"strategy.implementation={layout}", f"strategy.unit={unit}")
    config = config_of(*words, *chosen)
    expected = form_of(config, build_on_meta(config), "native")
    assert isinstance(expected, ShardedForm)
    rehearsal = rehearse(config)
    assert [each.rank for each in rehearsal.ranks] == [0, NUM_RANKS - 1]
    for each in rehearsal.ranks:
        agree(each, expected)


class Zeros(NoData):
    def microbatch(self) -> Microbatch:
        made = super().microbatch()
        inputs = {name: torch.zeros_like(tensor) for name, tensor in made.inputs.items()}
        return Microbatch(inputs, torch.zeros_like(made.labels))


def train_with_memory(config: Config, rank: int) -> tuple[list[StepRecord], int]:
    """Train as a rank of a fake world with real tensors; return the records and the bytes allocated before."""
    config = prepared(config, None)
    gc.collect()
    before = AllocationMeter(CPU).peak_bytes()
    assert before is not None
    words = config.data.vocab_size
    model = build_model(config.model, seed=0, device="cpu", vocab_size=words)
    with fake_world(rank, config.world_size) as world:
        checkpoint_as_configured(model.module, model.blocks, config.train)
        strategy = build_strategy(config, model, world)
        instruments = Instruments(config.train, world, Path())
        return list(
            train(
                strategy,
                cast(Data, Zeros(config)),
                config=config,
                world=world,
                instruments=instruments,
            )
        ), before


REAL = [
    ("zero3", "buffer", "bf16_master", True),
    ("zero3", "torch", "fp32", False),
]
MORE = [
    each
    for each in (
        *itertools.product(STAGES, LAYOUTS, ("fp32", "bf16_master"), (False, True)),
        *itertools.product(("zero2", "zero3"), ("torch",), ("fp32", "bf16_master"), (False, True)),
    )
    if each not in REAL
]


@pytest.mark.parametrize(
    ("stage", "implementation", "precision", "recomputes"),
    [*REAL, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
)
def test_the_peak_is_that_of_the_same_step_with_memory(
    stage, implementation, precision, recomputes
):
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    config = config_of(
        *LLAMA,
        f"strategy={stage}",
        f"strategy.implementation={implementation}",
        f"precision={precision}",
        f"train.activation_checkpointing={recomputes}",
    )
    records, before = train_with_memory(config, 1)
    (rehearsed,) = rehearse(config, ranks=[1]).ranks
    assert rehearsed.held_bytes == records[-1].memory_bytes
    assert rehearsed.traffic == records[UNDISTURBED_STEP].traffic
    peak = records[UNDISTURBED_STEP].peak_bytes
    assert peak is not None
    kept = RNG_STATE_BYTES * depth_of(config) if recomputes else 0
    kept += FSDP2_BYTES if implementation == "torch" else 0
    assert 0 <= peak - before - rehearsed.peak_bytes <= kept


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("train.recompute_every=3", marks=pytest.mark.slow),
        "train.recompute_except=[aten.mm,aten.addmm.default]",
    ],
)
def test_blocks_that_recompute_a_part_have_the_peak_of_the_same_step_with_memory(words):
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    recomputing = config_of(*LLAMA, "strategy=zero3", "train.activation_checkpointing=true")
    config = config_of(*LLAMA, "strategy=zero3", "train.activation_checkpointing=true", words)
    records, before = train_with_memory(config, 1)
    (rehearsed,) = rehearse(config, ranks=[1]).ranks
    assert rehearsed.held_bytes == records[-1].memory_bytes
    assert rehearsed.traffic == records[UNDISTURBED_STEP].traffic
    peak = records[UNDISTURBED_STEP].peak_bytes
    assert peak is not None
    assert 0 <= peak - before - rehearsed.peak_bytes <= RNG_STATE_BYTES * depth_of(config)
    assert rehearsed.peak_bytes > rehearse(recomputing, ranks=[1]).ranks[0].peak_bytes


def with_idle_parameters(config: ModelConfig, words: int | None) -> nn.Module:
    module = build_mlp(config, words)
    for block in module.blocks:
        block.register_parameter("idle", nn.Parameter(torch.zeros(7)))
    return module


@pytest.mark.parametrize("stage", ["ddp", "zero3"])
def test_parameters_that_nobody_uses_are_rehearsed_as_they_are(monkeypatch, stage):
    """They share a bucket with others, which are reduced beside zeros."""
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    family = replace(MODELS["mlp"], build=with_idle_parameters)
    monkeypatch.setitem(MODELS._values, "mlp", family)
    config = config_of(*MLP, f"strategy={stage}")
    records, before = train_with_memory(config, 1)
    (rehearsed,) = rehearse(config, ranks=[1]).ranks
    assert rehearsed.held_bytes == records[-1].memory_bytes
    assert rehearsed.traffic == records[UNDISTURBED_STEP].traffic
    peak = records[UNDISTURBED_STEP].peak_bytes
    assert peak is not None and peak - before == rehearsed.peak_bytes


def test_a_tied_weight_is_given_its_gradient_while_it_is_guarded():
    """Its rows are added once backward is over, when ZeRO-3 guards the weight."""
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    config = config_of(*LLAMA, "strategy=zero3", "model.tied_rows=true")
    records, before = train_with_memory(config, 1)
    (rehearsed,) = rehearse(config, ranks=[1]).ranks
    assert rehearsed.held_bytes == records[-1].memory_bytes
    peak = records[UNDISTURBED_STEP].peak_bytes
    assert peak is not None and peak - before == rehearsed.peak_bytes


@pytest.mark.parametrize("frozen", [[], pytest.param(["*experts*"], marks=pytest.mark.slow)])
def test_fused_experts_have_the_peak_of_the_same_step_with_memory(frozen):
    """Frozen experts have no gradient, and keep no input for it."""
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    config = config_of("model=mixtral_tiny", "data=synthetic", "data.seq_len=64", "strategy=zero3")
    config.model.freeze = frozen
    records, before = train_with_memory(config, 1)
    (rehearsed,) = rehearse(config, ranks=[1]).ranks
    assert rehearsed.held_bytes == records[-1].memory_bytes
    assert rehearsed.traffic == records[UNDISTURBED_STEP].traffic
    peak = records[UNDISTURBED_STEP].peak_bytes
    assert peak is not None
    assert peak - before == rehearsed.peak_bytes


def train_alone(config: Config) -> tuple[list[StepRecord], int]:
    """Train as the only rank of a real group, whose reducer is the real one."""
    config = prepared(config, None)
    gc.collect()
    before = AllocationMeter(CPU).peak_bytes()
    assert before is not None
    model = build_model(config.model, seed=0, device="cpu", vocab_size=config.data.vocab_size)
    with joined_process_group() as world:
        strategy = build_strategy(config, model, world)
        instruments, data = Instruments(config.train, world, Path()), cast(Data, Zeros(config))
        steps = train(strategy, data, config=config, world=world, instruments=instruments)
        return list(steps), before


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "views"), [("ddp", True), ("ddp", False), ("zero1", True)])
def test_ddp_is_rehearsed_with_the_peak_of_the_real_reducer(stage, views):
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    words = (f"strategy={stage}", "strategy.implementation=torch", "world_size=1")
    words += () if stage == "zero1" else (f"strategy.gradient_as_bucket_view={views}",)
    config = config_of(*LLAMA, *words, "data.global_batch_size=2")
    records, before = train_alone(config)
    (rehearsed,) = rehearse(config).ranks
    assert rehearsed.held_bytes == records[-1].memory_bytes
    peak = records[UNDISTURBED_STEP].peak_bytes
    assert peak is not None
    assert 0 <= peak - before - rehearsed.peak_bytes <= FSDP2_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deep_model_is_rehearsed_at_three_depths_with_the_numbers_of_its_own(layout):
    config = config_of(*LLAMA, "strategy=zero3", f"strategy.implementation={layout}")
    config = with_depth(config, 20)
    rehearsal = rehearse(config, ranks=[1])
    assert rehearsal.ranks == [rehearse_rank(prepared(config, None), 1, "cpu")]
    # Whole parameters get other owners at other depths.
    assert rehearsal.depths == ((4, 6, 8, 20) if layout == "parameter" else (4, 6, 8))


@pytest.mark.parametrize(
    ("change", "every", "depths"),
    [
        (lambda block: setattr(block, "up", nn.Linear(64, 512)), 10, (30,)),
        (lambda block: setattr(block, "window", 128), 10, (30,)),  # by which its memory may differ
        (lambda block: setattr(block, "act", nn.ReLU()), 2, (4, 6, 8)),  # as many in each depth
    ],
)
def test_a_model_whose_deeper_blocks_are_of_another_kind_is_rehearsed_at_its_own_depth(
    monkeypatch, change, every, depths
):
    def build(config: ModelConfig, words: int | None) -> nn.Module:
        module = build_mlp(config, words)
        for number, block in enumerate(module.blocks, start=1):
            block.number = number - 1  # what tells blocks of one kind apart
            if number % every == 0:
                change(block)
        return module

    monkeypatch.setitem(MODELS._values, "mlp", replace(MODELS["mlp"], build=build))
    config = with_depth(config_of(*MLP), 30)
    assert measure_at_depth(config, lambda at: [depth_of(at)])[1] == depths


@pytest.mark.parametrize(
    ("words", "rank", "told"),
    [
        (("model=moe_tiny", "data=synthetic"), 0, "model.family=moe"),
        (("data.global_batch_size=6",), 0, "data.global_batch_size=6"),
        ((), 4, "rank 4"),
    ],
)
def test_what_can_not_be_rehearsed_is_refused_in_one_line(words, rank, told):
    with pytest.raises(ConfigError, match=told) as refused:
        rehearse(config_of(*MLP, *words), ranks=[rank])
    assert "\n" not in str(refused.value)


class AsksForValues(torch.optim.SGD):
    def step(self, closure=None):
        if self.param_groups[0]["params"][0].grad.sum().item() < 1:
            super().step(closure)


def test_an_optimizer_that_asks_for_values_is_planned_without_a_rehearsal(monkeypatch):
    """Its own line is named, and the next point is rehearsed as if nothing had been."""
    kind = OptimizerKind(lambda groups, config: AsksForValues(groups), num_moments=lambda config: 0)
    config = config_of(*MLP)
    monkeypatch.setitem(OPTIMIZERS._values, "adamw", kind)
    with pytest.raises(
        ConfigError, match=r"test_rehearse.py, line \d+, can not run on tensors wit"
    ):
        rehearse(config)
    monkeypatch.undo()
    assert rehearse(config).ranks[0].peak_bytes


def test_a_bug_of_ours_is_no_matter_of_values(monkeypatch):
    monkeypatch.setattr("zeroexp.engines.build.DTYPES", {})
    with pytest.raises(KeyError, match="float32"):
        rehearse(config_of(*MLP))


def test_no_second_of_a_deep_model_lies_below_zero():
    """Bytes rise with the depth here, and what is waited for falls."""

    def measure(at: Config) -> list[dict[str, int | float]]:
        waited = 1.0 / depth_of(at)
        return [{"bytes": 10 * depth_of(at), "waited": waited, "compute": 0.5, "made by": "mm"}]

    (found,), depths = measure_at_depth(config_of("model=llama_7b", "world_size=8"), measure)
    assert len(depths) == 3
    assert found == {"bytes": 320, "waited": 0.0, "compute": 0.5, "made by": "mm"}


@pytest.mark.parametrize(("most", "given", "others"), [(None, 5, 0), (3, 3, 2), (9, 5, 0)])
def test_a_rehearsed_step_has_no_more_microbatches_than_the_real_one(most, given, others):
    config = config_of("model=tiny", "data=synthetic", f"data.global_batch_size={5 * NUM_RANKS}")
    data = NoData(config, most, holds_others=True)
    batch = data.step_batch(0, rank=0, world_size=NUM_RANKS)
    assert (len(batch.microbatches), len(data._others)) == (given, others)
