"""Closed forms count the gathers that a model causes where no schedule alone tells them.

That they agree with rehearsals and real steps is in test_rehearse.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.plan.real_steps import agree, config_of, in_a_fake_world
from zeroexp.config.families import MODELS, ModelFamily
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.rehearse import rehearse
from zeroexp.plan.sent_bytes import EngineForm
from zeroexp.plan.timing import Timeline

# Two microbatches.
STEP = ("data=synthetic", "data.seq_len=8", "strategy=zero3", "world_size=2")
STEP += ("data.global_batch_size=4",)
RECOMPUTES = "train.activation_checkpointing=true"
FROZEN = "model.freeze=[*embed*,*layers.0.*,*layers.1.*,*layers.2.*]"


@pytest.mark.parametrize(
    ("words", "gathers"),
    [
        # What is listed before the first trainable parameter has no backward.
        (("model=tiny", "model.hf_config.num_hidden_layers=6", FROZEN), (2, 1, 1, 1, 2, 2, 2)),
        # A model that asks for values is gathered as a plain one: here its root is kept.
        (("model=moe_tiny", "strategy.keep=last"), (1, 2, 2)),
    ],
)
def test_units_are_gathered_for_forward_and_for_backward(words, gathers):
    config = config_of(*STEP, "strategy.keep=none", *words)
    form = form_of(config, build_on_meta(config), "gloo")
    assert form.traffic(0).calls_by_kind["gather"] == 2 * sum(gathers)


def test_the_last_unit_of_a_block_that_recomputes_is_there_also_where_none_but_real_tensors_run():
    config = config_of(*STEP, "model=moe_tiny", "strategy.unit=module", RECOMPUTES)
    form = form_of(config, build_on_meta(config), "native")
    assert isinstance(form, EngineForm) and form.gathers is not None
    assert [*form.gathers[2:6], *form.gathers[6:10]] == [3, 3, 3, 2] * 2
    real = in_a_fake_world(config, 0).traffic.bytes_by_kind
    assert real["gather"] == form.traffic(0).bytes_by_kind["gather"]


LAST, ALL = "strategy.keep=last", "strategy.keep=all"
ONE_SHAPE = (
    "+model.hf_config={model_type: %s, vocab_size: 64, hidden_size: 32, intermediate_size: 48, "
)
ONE_SHAPE += "num_attention_heads: 4, num_hidden_layers: %d%s}"
HRM = ("model=hf", "model.name=hrm", ONE_SHAPE % ("hrm_text", 2, ""))
ALBERT = ("model=hf", "model.name=albert", "model.task=classification", "model.num_labels=3")
ALBERT += ("model.blocks=[albert.encoder.albert_layer_groups]", "data.task=classification")
ALBERT += (ONE_SHAPE % ("albert", 5, ", embedding_size: 8"),)
FROZEN_FRONT = "model.freeze=[*embed*,*layers.0.input_layernorm*,*layers.0.self_attn*]"
FRONT = [1, 2, 2, 2, 2, 3, 3, 2, 2, 3, *[3, 3, 3, 3, 3, 3, 2, 3, 3], 2]
BY_MODULE = ("model=tiny", "strategy.unit=module", "strategy.prefetch=1", RECOMPUTES)


@pytest.mark.parametrize(
    ("words", "gathers"),
    [
        # Blocks that run several times in a forward: the root, and each for five forwards and five backwards.
        ((*ALBERT, LAST), [1, 10]),
        # Kept until the first of these backwards.
        ((*ALBERT, ALL), [1, 5]),
        # Six forwards of the lower blocks, three of them without gradients, and two of the upper.
        ((*HRM, LAST), [1, *[6 + 3] * 2, *[2 + 2] * 2]),
        ((*HRM, ALL), [1, *[4 + 2] * 2, *[1 + 1] * 2]),
        # Nine modules of a block have parameters: that which it uses last is there when it recomputes. Then a norm.
        ((*BY_MODULE, LAST), [1, *[3, 3, 3, 3, 3, 3, 2, 3, 3] * 2, 2]),
        ((*BY_MODULE, LAST, "train.recompute_every=2"), [1, *[2] * 9, *[3] * 6, 2, 3, 3, 2]),
        ((*BY_MODULE, ALL), [1] * 20),
        # What is frozen in front has no backward, but runs again with its block, up to the first that is trained.
        ((*BY_MODULE, LAST, FROZEN_FRONT), FRONT),
    ],
)
def test_what_is_used_several_times_is_gathered_for_each_use(words, gathers):
    config = config_of(*STEP, *words)
    form = form_of(config, build_on_meta(config), "native")
    assert isinstance(form, EngineForm)
    assert form.gathers == gathers
    agree(rehearse(config), form)


class Loops(nn.Module):
    """Two blocks, which `run` calls."""

    def __init__(self, words: int):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, 8), nn.Linear(8, words)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.run(self.embed(input_ids))).neg()  # FSDP2 wants no view

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Truncated(Loops):
    """The last of three passes alone has a backward, which is told by no `no_grad`."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(3):
            y = super().run(x)
            x = y.detach()
        return y


class Reentrant(Loops):
    """Its blocks run without a graph, and again in backward."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Whole(Loops):
    """It recomputes both blocks at once, as torch advises."""

    def run(self, x: Tensor) -> Tensor:
        return checkpoint(super().run, x, use_reentrant=False)


class Looks(Loops):
    """The loss does not see its last block."""

    def run(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        self.blocks[1](y)
        return y


class Steps(Loops):
    """Its blocks take one token after another."""

    def run(self, x: Tensor) -> Tensor:
        return torch.cat([super(Steps, self).run(each) for each in x.split(1, 1)], 1)


class Chunks(Loops):
    """Its blocks take sixteen tokens at a time."""

    def run(self, x: Tensor) -> Tensor:
        return torch.cat([super(Chunks, self).run(each) for each in x.split(16, 1)], 1)


BY_MODULES = ("strategy.unit=module", RECOMPUTES)
OWN_LOOPS = (Loops, Whole, Truncated, Reentrant, Looks, Steps, Chunks)


@pytest.fixture
def loops() -> Iterator[None]:
    for made in OWN_LOOPS:
        family = ModelFamily(lambda _config, _words, made=made: made(64), blocks="blocks")
        MODELS.add(made.__name__.lower(), family)
    yield
    for made in OWN_LOOPS:
        MODELS.remove(made.__name__.lower())


@pytest.mark.parametrize(
    ("name", "words", "gathers"),
    [
        ("truncated", (LAST,), [1, 4, 4]),
        ("truncated", (ALL,), [1, 1, 1]),
        ("reentrant", (LAST,), [1, 3, 3]),
        ("reentrant", (ALL,), [1, 2, 2]),
        ("looks", (LAST,), [1, 2, 1]),
        ("steps", (LAST, "data.seq_len=20"), [1, 40, 40]),
        # An activation behind the last unit of a block makes the block recompute before that unit is there.
        ("loops", (LAST, *BY_MODULES), [1, 2, 2, 3, 3]),
        ("whole", (LAST,), [1, 3, 2]),
        ("chunks", (LAST, "data.seq_len=40"), [1, 6, 6]),
        ("truncated", (ALL, "model.freeze=[embed*,blocks.0*]"), [1, 1, 1]),
    ],
)
def test_uses_are_counted_by_where_backward_comes(loops, name, words, gathers):
    config = config_of(*STEP, f"model.family={name}", *words)
    form = form_of(config, build_on_meta(config), "native")
    assert isinstance(form, EngineForm)
    assert form.gathers == gathers
    agree(rehearse(config), form)


def test_uses_are_counted_for_each_length_of_one_model(loops):
    points = [config_of(*STEP, "model.family=steps", LAST, f"data.seq_len={n}") for n in (20, 40)]
    model = build_on_meta(points[0])
    forms = [form_of(config, model, "native") for config in points]
    assert [form.gathers for form in forms if isinstance(form, EngineForm)] == [
        [1, 40, 40],
        [1, 80, 80],
    ]


def test_few_tokens_tell_how_often_all_use_a_module(loops):
    config = config_of(*STEP, "model.family=steps", LAST, "data.seq_len=4095")
    model, lengths = build_on_meta(config), list[int]()
    model.module.embed.register_forward_hook(lambda *its: lengths.append(its[2].shape[1]))
    form = form_of(config, model, "native")
    assert isinstance(form, EngineForm)
    assert form.gathers == [1, 2 * 4095, 2 * 4095]
    assert lengths == [7, 11, 15]


def test_many_tokens_only_tell_of_chunks_by_a_forward_alone(loops):
    """Their backward was most of the time that plans of recurrent models took."""
    config = config_of(*STEP, "model.family=loops", RECOMPUTES, "data.seq_len=4095")
    model, passes = build_on_meta(config), list[tuple[int, bool]]()
    embed = model.module.embed
    embed.register_forward_hook(lambda *its: passes.append((its[2].shape[1], its[2].requires_grad)))
    form_of(config, model, "native")
    assert passes == [(7, True), (11, True), (256, False)]


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.parametrize("model", ["hrm", "truncated", "reentrant", "looks"])
def test_fsdp2_gathers_anew_for_each_use(monkeypatch, loops, model, stage):
    calls: Counter[str] = Counter()
    run, forget = Timeline.run, Timeline.forget

    def counted(self, func, args, kwargs):
        calls[func._schema.name.partition("::")[2]] += 1
        return run(self, func, args, kwargs)

    words = HRM if model == "hrm" else (f"model.family={model}",)
    config = config_of(*STEP, *words, f"strategy={stage}", "strategy.implementation=torch")
    form = form_of(config, build_on_meta(config), "native")
    monkeypatch.setattr(Timeline, "run", counted)
    steps: list[Counter[str]] = []
    monkeypatch.setattr(Timeline, "forget", lambda self: (steps.append(calls.copy()), forget(self)))
    rehearse(config)
    of_step = steps[1] - steps[0]
    of_form = form.traffic(0).calls_by_kind
    found = of_step["_allgather_base_"], of_step["_reduce_scatter_base_"]
    assert found == (of_form["gather"], of_form["reduce"])
