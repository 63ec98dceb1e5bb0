"""A rehearsal, the closed forms and real steps agree to the byte, in every stage, layout, unit and transport.

Real steps are those of real peers, or of a rank of the same fake world with real tensors; the allocator of each counts
every byte.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.plan.real_steps import (
    ELEMENT_BYTES,
    LAYOUTS,
    LLAMA,
    MLP,
    NUM_RANKS,
    STAGES,
    Steps,
    agree,
    alone,
    among_peers,
    config_of,
    in_a_fake_world,
    packed_bytes,
    quick_or_slow,
    random_states_bytes,
)
from tests.strategies.pairwise import Row, pairwise
from zeroexp.config.families import MODELS
from zeroexp.config.job_shape import JobShape
from zeroexp.config.keys import Config, ConfigError, ModelConfig
from zeroexp.config.optimizer import OPTIMIZERS, OptimizerKind
from zeroexp.models.mlp import MlpBlock
from zeroexp.models.mlp import build as build_mlp
from zeroexp.plan.caching_allocator import replay
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.machines import Machines
from zeroexp.plan.rehearse import CHECKPOINT, RehearsedRank, rehearse
from zeroexp.plan.sent_bytes import EngineForm
from zeroexp.plan.stand_ins import NoData

# -- points ----------------------------------------------------------------------------------------

# A point is its words and how many ranks share a host; FAKE: one rank of a world that moves nothing, as GPUs do.
FAKE = None


def point(stage: str, implementation: str, *words: str) -> tuple[str, ...]:
    return (f"strategy={stage}", f"strategy.implementation={implementation}", *words)


def llama(stage: str, layout: str, unit: str = "block", *words: str) -> tuple[str, ...]:
    return (*LLAMA, *point(stage, layout, f"strategy.unit={unit}", *words))


def by_module(model: str, keep: str, prefetch: int, accumulation: int) -> tuple[str, ...]:
    batch = ("world_size=2", f"data.global_batch_size={2 * accumulation}", "data.seq_len=8")
    schedule = (f"strategy.keep={keep}", f"strategy.prefetch={prefetch}")
    words = (f"model={model}", "data=synthetic", "strategy=zero3", "strategy.unit=module")
    return (*words, *batch, *schedule)


RECOMPUTES = "train.activation_checkpointing=true"
MIXTRAL = ("model=mixtral_tiny", *LLAMA[1:])
CODECS = ("strategy.gather_codec=int8", "strategy.reduce_codec=int4")
CODES = "strategy.parameters.dtype=float8"
MASTERS = "strategy.parameters.dtype=master"
GROUPS = "strategy.replicas=2"
OVER_ALL = "strategy.optimizer.over=all"
COPIES = "strategy.secondary_partition=2"
OUTER = "strategy.outer.every=1"
OFFLOAD = "strategy.offload=optimizer"
ALL_OFF = "strategy.offload=all"
PART, IN_FILES = "strategy.offload_fraction=0.4", "strategy.offload_folder=."
ONE_LAYER = "model.hf_config.num_hidden_layers=1"
BELOW_ALL_GRADIENTS = "model.freeze=[*embed*,*layers.0.*]"
CELLS = [*itertools.product(STAGES, LAYOUTS)]
# What an engine does beside a step is the same whatever is trained.
OF_ENGINES = [
    *((4, point("zero3", "buffer", *codecs)) for codecs in ((), CODECS)),
    (2, point("zero3", "buffer", COPIES)),
    (FAKE, point("zero3", "parameter", COPIES, *CODECS)),
    (FAKE, point("zero3", "parameter", CODES, COPIES, OFFLOAD)),
    (4, point("zero3", "tensor", MASTERS, "precision=bf16_master")),
    (4, point("zero3", "buffer", ALL_OFF)),
    (FAKE, point("zero3", "tensor", ALL_OFF, "precision=bf16_master")),
    (FAKE, point("zero1", "parameter", OFFLOAD, "precision=bf16_master")),
    (2, point("zero3", "tensor", ALL_OFF, PART, "precision=bf16_master")),
    # Without torch's fused kernel the optimizer reads the number of steps.
    (
        FAKE,
        point("zero1", "tensor", OFFLOAD, IN_FILES, "precision=paper16", "optimizer.fused=false"),
    ),
    (4, point("zero2", "tensor", GROUPS)),
    (2, point("zero3", "buffer", GROUPS)),  # replicas are on another host
    (2, point("zero3", "buffer", GROUPS, OVER_ALL)),
    (FAKE, point("zero1", "parameter", GROUPS, OVER_ALL)),
    (2, point("zero3", "buffer", GROUPS, OUTER)),
    (FAKE, point("zero2", "parameter", GROUPS, OUTER, "precision=bf16_master")),
]
# As well, of which each has a sibling above that is hosted, or meets its pair, in another way.
MORE_OF_ENGINES = [
    (FAKE, point("zero3", "parameter", *CODECS)),
    (4, point("zero3", "buffer", CODES, "precision=bf16_master")),
    (4, point("zero3", "buffer", OFFLOAD)),
    (4, point("zero2", "tensor", OFFLOAD, PART)),
    (1, point("zero2", "tensor", OFFLOAD, "precision=paper16")),
    (4, point("zero2", "tensor", GROUPS, OVER_ALL)),
]
POINTS = [
    # Every stage, and every layout twice or once.
    *(
        (FAKE, (*MLP, *point(*each)))
        for each in CELLS
        if (STAGES.index(each[0]) - LAYOUTS.index(each[1])) % 3 == 0
    ),
    # The fewest operations, each of which takes a rehearsal half a millisecond.
    *((ranks_per_host, (*MLP, *words)) for ranks_per_host, words in OF_ENGINES[::2]),
    # Tied, and with activations that are not small.
    (FAKE, (*LLAMA, *point("zero3", "buffer", "precision=bf16_master", RECOMPUTES))),
    # Its rows are added once backward is over, when ZeRO-3 guards the weight.
    (FAKE, (*MIXTRAL, "strategy=zero3", "data.micro_batch_size=1", "data.global_batch_size=4")),
    (FAKE, (*LLAMA, *point("zero3", "buffer", ALL_OFF, PART, IN_FILES))),
    (2, (*by_module("tiny", "last", 6, 1), ONE_LAYER)),
    (2, by_module("gpt2_tiny", "none", 2, 1)),
    (2, (*by_module("tiny", "last", 1, 2), "strategy.unit=block", BELOW_ALL_GRADIENTS)),
    # Decoded and coded anew, which is where they peak: data of so few tokens has small activations.
    (FAKE, (*by_module("tiny", "last", 1, 1), "strategy.unit=block", "optimizer.moments=int8")),
]
# The rest by pairs: of a world that moves nothing, of hosts with peers, and of units that are modules.
FAKED = {
    "words": [LLAMA, MLP],
    "stage": STAGES,
    "layout": [*LAYOUTS, "torch"],
    "unit": ["block", "module", "model", "layer"],
    "precision": ["fp32", "bf16_master"],
    "recomputes": [(), (RECOMPUTES,)],
}
HOSTS = {
    "stage": STAGES,
    "layout": LAYOUTS,
    "per_host": [4, 2, 1],
    "more": [(), ("precision=bf16_master",), (GROUPS,), (RECOMPUTES,), (OFFLOAD,)],
}
MODULES = {
    "model": ["tiny", "gpt2_tiny", "mixtral_tiny"],
    "keep": ["none", "last", "all"],
    "prefetch": [0, 1, 2, 6],
    "accumulation": [1, 3],
    "per_host": [1, 2],
}


def is_defined(row: Row) -> bool:
    """FSDP2 is faked alone of torch's engines, in units of blocks; what all-reduces has no groups."""
    if row.get("stage") in ("ddp", "zero1_allreduce") and row.get("more") == (GROUPS,):
        return False
    of_torch = row.get("layout") == "torch"
    of_fsdp2 = row.get("stage") in ("zero2", "zero3", None) and row.get("unit") in ("block", None)
    has_units = row.get("words") != MLP or not row.get("recomputes")
    return (not of_torch or (of_fsdp2 and row.get("words") != MLP)) and has_units


def faked(row: Row) -> tuple[str, ...]:
    unit, precision = f"strategy.unit={row['unit']}", f"precision={row['precision']}"
    words = point(row["stage"], row["layout"], unit, precision)
    return (*row["words"], *words, *row["recomputes"])


WIDE = [
    *((FAKE, faked(row)) for row in pairwise(FAKED, every=("stage", "layout"), legal=is_defined)),
    *(
        (row["per_host"], llama(row["stage"], row["layout"], "block", *row["more"]))
        for row in pairwise(HOSTS, every=("stage", "layout", "per_host"), legal=is_defined)
    ),
    *(
        (row.pop("per_host"), by_module(**row))
        for row in pairwise(MODULES, every=("model", "keep"), legal=is_defined)
    ),
]
MORE = [
    *((ranks_per_host, (*MLP, *words)) for ranks_per_host, words in OF_ENGINES[1::2]),
    *((ranks_per_host, (*LLAMA, *words)) for ranks_per_host, words in OF_ENGINES),
    *(
        (ranks_per_host, (*model, *words))
        for ranks_per_host, words in MORE_OF_ENGINES
        for model in (LLAMA, MLP)
    ),
    (1, (*LLAMA, *point("zero2", "tensor"))),
    (FAKE, (*LLAMA, *point("zero3", "torch"))),
    # Replicas are compared in the first steps, which takes real ranks more than the small model's step.
    (4, (*LLAMA, *point("zero1", "buffer", GROUPS))),
    (4, (*LLAMA, *point("zero1", "tensor", "strategy.replicas=4", OUTER))),
    (2, (*LLAMA, *point("zero3", "buffer", GROUPS, OVER_ALL, "precision=bf16_master"))),
    *(
        (4, llama(stage, "buffer", unit, RECOMPUTES))
        for stage, unit in itertools.product(("zero2", "zero3"), ("model", "module"))
    ),
    *((1, by_module(model, "last", 1, 2)) for model in ("tiny", "mixtral_tiny")),
    (1, (*by_module("tiny", "last", 1, 2), ONE_LAYER)),
    *(
        (1, (*by_module("tiny", keep, 1, 2), BELOW_ALL_GRADIENTS))
        for keep in ("none", "last", "all")
    ),
    (FAKE, (*LLAMA, "strategy=zero3", RECOMPUTES, "train.recompute_every=3")),
    # They have no gradient, and keep no input for it.
    (FAKE, (*MIXTRAL, "strategy=zero3", "model.freeze=[*experts*]")),
]


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(("ranks_per_host", "words"), quick_or_slow(POINTS, MORE, WIDE))
def test_a_rehearsal_the_closed_forms_and_real_steps_agree(ranks, ranks_per_host, words):
    config = config_of(*words)
    size, transports = config.world_size, ("native",)
    if ranks_per_host is FAKE:
        real = [in_a_fake_world(config, 1)]
    else:
        real = ranks(among_peers, config, ranks_per_host, world_size=size)
        hosts = Machines("cpu", JobShape(size // ranks_per_host, ranks_per_host))
        transports = hosts.transports(config.grid)
    form = form_of(config, build_on_meta(config), *transports)
    if isinstance(form, EngineForm):  # the config names one host
        form = replace(form, ranks_per_node=ranks_per_host)
    if isinstance(form, EngineForm):
        for each in real:
            agree(each, form)
    check(config, [real[0], real[-1]], ranks_per_host)


def check(config: Config, real: list[Steps], ranks_per_host: int | None = FAKE) -> RehearsedRank:
    """Compare rehearsed ranks with real ones, which may hold a little more at their peak. Return the last."""
    of_one_rank = ranks_per_host in (FAKE, 1)  # in a rehearsal shared memory is in peaks alone
    more = random_states_bytes(config) + packed_bytes(config)
    if ranks_per_host or config.strategy.implementation == "torch":
        more += ELEMENT_BYTES
    for found in {each.rank: each for each in real}.values():
        each = rehearse(config, found.rank, reads=of_one_rank, ranks_per_host=ranks_per_host)
        assert 0 <= found.peak_bytes - each.peak_bytes <= more
        assert each.traffic == found.traffic
        assert not of_one_rank or each.held_bytes == found.held_bytes
    return each


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_what_fsdp2_gathers_is_no_activation(stage):
    """Between forward and backward, where a step holds most, is what the form says."""
    config = config_of(*LLAMA, *point(stage, "torch"))
    found = rehearse(config, ranks_per_host=4).peaks
    gathered = form_of(config, build_on_meta(config), "gloo").held_bytes("after_forward", 0)
    assert found["backward"].by_kind["buffers"] == gathered["buffers"]


@pytest.mark.parametrize("every", [2, 3])
def test_what_saves_between_rare_outer_steps_is_rehearsed_where_there_is_a_state(every):
    words = (f"strategy.outer.every={every}", "train.steps=12", f"checkpoint.every={2 * every}")
    config = config_of(*MLP, *point("zero2", "buffer", GROUPS, *words))
    held = rehearse(config, ranks_per_host=4).peaks["forward"].by_kind
    assert held[CHECKPOINT] > 0


def test_a_rehearsal_watches_no_step_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watched = config_of(*MLP, "train.trace_steps=[0,1]", "train.profile_steps=[1]")
    assert rehearse(watched).peaks == rehearse(config_of(*MLP)).peaks
    assert not [*tmp_path.iterdir()]


def test_one_of_a_thousand_ranks_is_rehearsed_as_the_closed_forms_say():
    """And the world leaves no hook for errors behind: torch's calls this process, which plans on, a rank."""
    before, batch = sys.excepthook, "data.global_batch_size=2048"
    config = config_of(*MLP, *point("zero3", "parameter", "world_size=1024", batch))
    expected = form_of(config, build_on_meta(config), "native")
    assert isinstance(expected, EngineForm)
    last = rehearse(config, 1023, reads=True)
    agree(last, expected)
    assert sys.excepthook is before


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_blocks_that_recompute_a_part_hold_more_than_those_that_recompute_all():
    kept = "train.recompute_except=[aten.mm,aten.addmm.default]"
    longer = (*LLAMA, ONE_LAYER, "strategy=zero3", RECOMPUTES, "data.seq_len=128")
    config = config_of(*longer, kept)
    found = check(config, [in_a_fake_world(config, 1)])
    all_of_it = rehearse(config_of(*longer), 1)
    assert found.peak_bytes > all_of_it.peak_bytes


def with_idle_parameters(config: ModelConfig, words: int | None) -> nn.Module:
    module = build_mlp(config, words)
    for block in module.blocks:
        block.register_parameter("idle", nn.Parameter(torch.zeros(7)))
    return module


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("stage", ["ddp", "zero3"])
def test_parameters_that_nobody_uses_are_rehearsed_as_they_are(monkeypatch, stage):
    """They share a bucket with others, which are reduced beside zeros."""
    family = replace(MODELS["mlp"], build=with_idle_parameters)
    monkeypatch.setitem(MODELS._values, "mlp", family)
    config = config_of(*MLP, f"strategy={stage}")
    check(config, [in_a_fake_world(config, 1)])


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("words", ["strategy=ddp", "strategy=zero1", "views"])
def test_ddp_is_rehearsed_with_the_peak_of_the_real_reducer(words):
    views = ("strategy=ddp", "strategy.gradient_as_bucket_view=false")
    one_rank = ("strategy.implementation=torch", "world_size=1", "data.global_batch_size=2")
    config = config_of(*LLAMA, *one_rank, *(views if words == "views" else (words,)))
    check(config, [alone(config)])


# -- what can not be rehearsed ---------------------------------------------------------------------


def test_what_can_not_be_rehearsed_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"model\.family=moe") as refused:
        rehearse(config_of(*MLP, "model=moe_tiny", "data=synthetic"))
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
    line = r"test_rehearse.py, line \d+, can not run on tensors wit"
    with pytest.raises(ConfigError, match=line):
        rehearse(config)
    monkeypatch.undo()
    assert rehearse(config).peak_bytes


def test_a_bug_of_ours_is_no_matter_of_values(monkeypatch):
    monkeypatch.setattr("zeroexp.engines.build.DTYPES", {})
    with pytest.raises(KeyError, match="float32"):
        rehearse(config_of(*MLP))


class ConvertsAWeight(MlpBlock):
    """It reads a weight of a module inside of it before it calls that module."""

    def forward(self, x):
        return super().forward(x * self.up.weight.float().sum())


def test_a_freed_weight_that_is_converted_is_named_in_a_rehearsal_as_in_a_run(monkeypatch):
    monkeypatch.setattr("zeroexp.models.mlp.MlpBlock", ConvertsAWeight)
    config = config_of(*MLP, "strategy=zero3", "strategy.unit=module")
    with pytest.raises(ConfigError, match=r"in a run: parameter blocks\.0\.up\.weight is freed"):
        rehearse(config)


@pytest.mark.parametrize(("most", "given", "others"), [(None, 5, 0), (3, 3, 2), (9, 5, 0)])
def test_a_rehearsed_step_has_no_more_microbatches_than_the_real_one(most, given, others):
    config = config_of(*LLAMA, f"data.global_batch_size={5 * NUM_RANKS}")
    data = NoData(config, most, holds_others=True)
    batch = data.step_batch(0, rank=0, world_size=NUM_RANKS)
    assert (len(batch.microbatches), len(data._others)) == (given, others)


# -- what an allocator sees ------------------------------------------------------------------------


def test_fsdp2_allocates_on_three_streams_and_never_a_whole_tensor_in_the_first_step():
    """DTensor asks for the shapes of an optimizer's state with whole tensors, which no rank holds."""
    words = ("data.global_batch_size=48", "world_size=48", "data.seq_len=8", "model=tiny")
    rank = rehearse(config_of(*words, "data=synthetic", *point("zero3", "torch")))
    first, second = rank.changes
    assert len({stream for _, num_bytes, stream in first if num_bytes}) == 3
    held = replay(first, second, expandable=False)
    # The first step holds no more than the second, but for the rounding of each storage to 512 bytes.
    assert rank.peak_bytes <= held.peak_allocated_bytes <= rank.peak_bytes + 512 * len(first)
