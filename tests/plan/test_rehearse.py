"""A rehearsal agrees to the byte with the closed forms and with real steps, in every stage, layout and unit.

The real steps are those of a rank of the same fake world with real tensors, whose allocator counts every byte.
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
    config_of,
    in_a_fake_world,
    quick_or_slow,
    random_states_bytes,
)
from zeroexp.config.families import MODELS
from zeroexp.config.keys import Config, ConfigError, ModelConfig
from zeroexp.config.optimizer import OPTIMIZERS, OptimizerKind
from zeroexp.models.mlp import build as build_mlp
from zeroexp.plan.closed_forms import ShardedForm
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.rehearse import RehearsedRank, rehearse
from zeroexp.plan.stand_ins import NoData


def point(stage: str, implementation: str, *words: str) -> tuple[str, ...]:
    return (f"strategy={stage}", f"strategy.implementation={implementation}", *words)


# -- with closed forms -----------------------------------------------------------------------------

# Every stage, and every layout twice or once. Real ranks are compared in test_planned_peak.py.
QUICK = [
    (MLP, *each, "block")
    for each in itertools.product(STAGES, LAYOUTS)
    if (STAGES.index(each[0]) - LAYOUTS.index(each[1])) % 3 == 0
]
ALL = itertools.product((MLP, LLAMA), STAGES, LAYOUTS, ("model", "block", "module"))


@pytest.mark.parametrize(("words", "stage", "layout", "unit"), quick_or_slow(QUICK, [*ALL]))
def test_states_and_traffic_are_those_of_the_closed_forms(words, stage, layout, unit):
    config = config_of(*words, *point(stage, layout, f"strategy.unit={unit}"))
    expected = form_of(config, build_on_meta(config), "native")
    assert isinstance(expected, ShardedForm)
    rehearsed = rehearse(config, reads=True)
    assert [each.rank for each in rehearsed] == [0, NUM_RANKS - 1]
    for each in rehearsed:
        agree(each, expected)


def test_one_of_a_thousand_ranks_is_rehearsed_as_the_closed_forms_say():
    """And the world leaves no hook for errors behind: torch's calls this process, which plans on, a rank."""
    before, batch = sys.excepthook, "data.global_batch_size=2048"
    config = config_of(*MLP, *point("zero3", "parameter", "world_size=1024", batch))
    expected = form_of(config, build_on_meta(config), "native")
    assert isinstance(expected, ShardedForm)
    (last,) = rehearse(config, ranks=[1023], reads=True)
    agree(last, expected)
    assert sys.excepthook is before


# -- with memory -----------------------------------------------------------------------------------


def check(config: Config, real: Steps, more_bytes: int = 0) -> RehearsedRank:
    """The peak is that of the same step with memory, which may hold so many bytes more."""
    (rehearsed,) = rehearse(config, ranks=[real.rank], reads=True)
    assert rehearsed.held_bytes == real.held_bytes
    assert rehearsed.traffic == real.traffic
    assert 0 <= real.peak_bytes - rehearsed.peak_bytes <= more_bytes
    return rehearsed


RECOMPUTES = "train.activation_checkpointing=true"
MIXTRAL = ("model=mixtral_tiny", *LLAMA[1:])
EVERY_MATRIX_KEPT = "train.recompute_except=[aten.mm,aten.addmm.default]"
REAL = [
    (*LLAMA, *point("zero3", "buffer", "precision=bf16_master", RECOMPUTES)),
    (*LLAMA, *point("zero3", "torch")),
    # Its rows are added once backward is over, when ZeRO-3 guards the weight.
    (*LLAMA, *point("zero3", "buffer", "model.tied_rows=true")),
    (*MIXTRAL, "strategy=zero3"),
]
MORE = [
    *(
        (*LLAMA, *point(*each, f"precision={precision}", f"train.activation_checkpointing={again}"))
        for each in (*itertools.product(STAGES, LAYOUTS), ("zero2", "torch"), ("zero3", "torch"))
        for precision, again in itertools.product(("fp32", "bf16_master"), ("false", "true"))
    ),
    (*LLAMA, "strategy=zero3", RECOMPUTES, "train.recompute_every=3"),
    # They have no gradient, and keep no input for it.
    (*MIXTRAL, "strategy=zero3", "model.freeze=[*experts*]"),
]


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    "words", quick_or_slow([(each,) for each in REAL], [(each,) for each in MORE])
)
def test_the_peak_is_that_of_the_same_step_with_memory(words):
    config = config_of(*words)
    more = random_states_bytes(config)
    more += ELEMENT_BYTES if config.strategy.implementation == "torch" else 0
    check(config, in_a_fake_world(config, 1), more)


@pytest.mark.usefixtures("counted")
def test_blocks_that_recompute_a_part_hold_more_than_those_that_recompute_all():
    config = config_of(*LLAMA, "strategy=zero3", RECOMPUTES, EVERY_MATRIX_KEPT)
    found = check(config, in_a_fake_world(config, 1), random_states_bytes(config))
    (all_of_it,) = rehearse(config_of(*LLAMA, "strategy=zero3", RECOMPUTES), ranks=[1])
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
    check(config, in_a_fake_world(config, 1))


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("words", ["strategy=ddp", "strategy=zero1", "views"])
def test_ddp_is_rehearsed_with_the_peak_of_the_real_reducer(words):
    views = ("strategy=ddp", "strategy.gradient_as_bucket_view=false")
    one_rank = ("strategy.implementation=torch", "world_size=1", "data.global_batch_size=2")
    config = config_of(*LLAMA, *one_rank, *(views if words == "views" else (words,)))
    check(config, alone(config), ELEMENT_BYTES)


# -- what can not be rehearsed ---------------------------------------------------------------------


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
    line = r"test_rehearse.py, line \d+, can not run on tensors wit"
    with pytest.raises(ConfigError, match=line):
        rehearse(config)
    monkeypatch.undo()
    assert rehearse(config)[0].peak_bytes


def test_a_bug_of_ours_is_no_matter_of_values(monkeypatch):
    monkeypatch.setattr("zeroexp.engines.build.DTYPES", {})
    with pytest.raises(KeyError, match="float32"):
        rehearse(config_of(*MLP))


@pytest.mark.parametrize(("most", "given", "others"), [(None, 5, 0), (3, 3, 2), (9, 5, 0)])
def test_a_rehearsed_step_has_no_more_microbatches_than_the_real_one(most, given, others):
    config = config_of(*LLAMA, f"data.global_batch_size={5 * NUM_RANKS}")
    data = NoData(config, most, holds_others=True)
    batch = data.step_batch(0, rank=0, world_size=NUM_RANKS)
    assert (len(batch.microbatches), len(data._others)) == (given, others)
