"""The forms of torch's engines against what DDP, ZeroRedundancyOptimizer and FSDP2 really hold and send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.composing import composed
from tests.plan.real_steps import one_step
from zeroexp.config.keys import Config
from zeroexp.engines.build import build_strategy
from zeroexp.measure.record import MOMENTS
from zeroexp.measure.tcp_bytes import sent_bytes
from zeroexp.models.module import build_model
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.form_terms import PrecisionForm
from zeroexp.plan.torch_closed_forms import DdpForm, FsdpForm, ParameterShape
from zeroexp.process.world import World, barrier

IDS = torch.arange(8).view(1, 8)


def config_of(strategy: str, world_size: int, accumulation: int, *words: str):
    """A LLaMA whose sizes three ranks can not divide."""
    return composed(
        "model=tiny",
        "model.hf_config.hidden_size=40",
        "model.hf_config.intermediate_size=67",
        "model.hf_config.vocab_size=101",
        f"strategy={strategy}",
        "strategy.implementation=torch",
        f"world_size={world_size}",
        f"data.global_batch_size={accumulation * world_size}",
        *words,
    )


FROZEN_BASE = ("model.lora.r=4", "precision=bf16_master")


def check_on_ranks(world: World, accumulation: int) -> None:
    points = [(stage, ()) for stage in ("ddp", "zero1", "zero2", "zero3")]
    points += [("ddp", ("strategy.gradient_as_bucket_view=false",))]
    points += [(stage, FROZEN_BASE) for stage in ("zero2", "zero3")]
    if world.size == 4:
        points = [(stage, ("strategy.replicas=2",)) for stage in ("zero2", "zero3")]
    for stage, words in points:
        check_held(world, config_of(stage, world.size, accumulation, *words), accumulation)


def check_held(world: World, config: Config, accumulation: int) -> None:
    form = form_of(config, build_on_meta(config), "gloo")
    model = build_model(config.model, seed=0, device=world.device)
    strategy = build_strategy(config, model, world)
    held: dict[str, dict[str, int]] = {}
    for _ in range(2):
        one_step(strategy, IDS, accumulation, held)
    for moment in MOMENTS:
        expected = form.held_bytes(moment, world.rank)
        assert held[moment] == expected, (config.strategy.name, world.rank, moment)
    barrier()


@pytest.mark.parametrize(
    ("world_size", "accumulation"),
    [
        pytest.param(1, 2, marks=pytest.mark.slow),
        (2, 1),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
def test_real_ranks_hold_what_the_forms_say(ranks, world_size, accumulation):
    ranks(check_on_ranks, accumulation, world_size=world_size)


def test_what_is_frozen_rests_in_the_dtype_of_computation():
    """It has no master: (7, 3) rows of 3 ranks in float32, and frozen ones of half the bytes; padded are two rows."""
    mixed = PrecisionForm("bfloat16", "float32", "float32")
    unit = [ParameterShape((7, 3)), ParameterShape((7, 3), trainable=False)]
    form = FsdpForm([unit], world_size=3, precision=mixed)
    assert form.held_bytes("at_rest", 0)["parameters"] == (4 + 2) * 3 * 3
    assert [form.padding_bytes(rank) for rank in range(3)] == [0, 0, (4 + 2) * 2 * 3]


def check_wire(
    world: World, stage: str, words: tuple[str, ...], scattering: Sequence[str] = ("zero2", "zero3")
) -> None:
    """On two ranks gloo's all-reduce and all-gather send what a ring sends; its reduce-scatter sends twice that.

    scattering: stages whose engine calls it.
    """
    config = config_of(stage, world.size, 2, *words)
    form = form_of(config, build_on_meta(config), "gloo")
    model = build_model(config.model, seed=0, device=world.device)
    strategy = build_strategy(config, model, world)
    for _ in range(2):
        one_step(strategy, IDS, 2, {})
    barrier()
    before = sent_bytes()
    one_step(strategy, IDS, 2, {})
    barrier()
    sent = form.traffic(world.rank).bytes_by_kind
    doubled = sent["reduce"] if stage in scattering else 0
    wire = sent_bytes() - before - doubled
    assert sum(sent.values()) <= wire <= 1.02 * sum(sent.values()) + 20_000, (stage, wire, sent)


FROZEN = "model.freeze=[*embed*,*layers.0.*,*layers.1.*,*layers.2.*]"
FIRST_FROZEN = ("model.hf_config.num_hidden_layers=5", "model.hf_config.vocab_size=40", FROZEN)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        *((stage, ()) for stage in ("ddp", "zero2", "zero3")),
        *((stage, ("model.lora.r=4",)) for stage in ("zero2", "zero3")),
        ("zero3", FIRST_FROZEN),
    ],
)
def test_the_wire_carries_what_the_forms_say(ranks, stage, words):
    ranks(check_wire, stage, ("model.hf_config.hidden_size=136", *words), world_size=2)


def test_the_state_of_zero1_is_dealt_out_by_size():
    """Sizes 9, 5, 4 and then 2, 2: the ranks get 9 | 5 + 4, then both 2 to the ranks with least, one each."""
    groups = [
        [ParameterShape((4,)), ParameterShape((9,)), ParameterShape((5,))],
        [ParameterShape((2,)), ParameterShape((2,))],
    ]
    frozen = [ParameterShape((3,), trainable=False)]
    form = DdpForm(groups, frozen, shards_optimizer=True, world_size=2)
    assert [form.held_elements(rank).owned for rank in range(2)] == [9 + 2, 5 + 4 + 2]
    assert form.held_bytes("at_rest", 0)["optimizer"] == 8 * 11 + 4 * 2
    assert form.traffic(0).bytes_by_kind == {"reduce": 4 * 22, "publish": 4 * 11}
    assert replace(form, shards_optimizer=False).held_elements(1).owned == 22


def test_the_last_ranks_of_fsdp2_have_fewer_rows():
    """Five rows of 3 on 4 ranks: 2, 2, 1 and 0 rows, each in the room of two."""
    form = FsdpForm([[ParameterShape((5, 3))]], world_size=4)
    assert [form.held_elements(rank).owned for rank in range(4)] == [6, 6, 3, 0]
    assert [form.held_elements(rank).padding for rank in range(4)] == [0, 0, 3, 6]
    assert {form.held_bytes("at_rest", rank)["parameters"] for rank in range(4)} == {4 * 6}
