"""Closed forms count the gathers that a model causes where no schedule alone tells them.

That they agree with rehearsals and real steps is in test_rehearse.py.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.plan.real_steps import agree, config_of
from zeroexp.plan.closed_forms import EngineForm
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.rehearse import rehearse
from zeroexp.plan.timing import Timeline

# Two microbatches.
STEP = ("data=synthetic", "data.seq_len=8", "strategy=zero3", "world_size=2")
STEP += ("data.global_batch_size=4",)
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


LAST, ALL = "strategy.keep=last", "strategy.keep=all"
RECOMPUTES = "train.activation_checkpointing=true"
ONE_SHAPE = (
    "+model.hf_config={model_type: %s, vocab_size: 64, hidden_size: 32, intermediate_size: 48, "
)
ONE_SHAPE += "num_attention_heads: 4, num_hidden_layers: %d%s}"
HRM = ("model=hf", "model.name=hrm", ONE_SHAPE % ("hrm_text", 2, ""))
ALBERT = ("model=hf", "model.name=albert", "model.task=classification", "model.num_labels=3")
ALBERT += ("model.blocks=[albert.encoder.albert_layer_groups]", "data.task=classification")
ALBERT += (ONE_SHAPE % ("albert", 5, ", embedding_size: 8"),)
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
    ],
)
def test_what_is_used_several_times_is_gathered_for_each_use(words, gathers):
    config = config_of(*STEP, *words)
    form = form_of(config, build_on_meta(config), "native")
    assert isinstance(form, EngineForm)
    assert form.gathers == gathers
    agree(rehearse(config), form)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_fsdp2_gathers_anew_for_each_use(monkeypatch, stage):
    calls: Counter[str] = Counter()
    run, forget = Timeline.run, Timeline.forget

    def counted(self, func, args, kwargs):
        calls[func._schema.name.partition("::")[2]] += 1
        return run(self, func, args, kwargs)

    config = config_of(*STEP, *HRM, f"strategy={stage}", "strategy.implementation=torch")
    form = form_of(config, build_on_meta(config), "native")
    monkeypatch.setattr(Timeline, "run", counted)
    steps: list[Counter[str]] = []
    monkeypatch.setattr(Timeline, "forget", lambda self: (steps.append(calls.copy()), forget(self)))
    rehearse(config)
    of_step = steps[1] - steps[0]
    of_form = form.traffic(0).calls_by_kind
    found = of_step["_allgather_base_"], of_step["_reduce_scatter_base_"]
    assert found == (of_form["gather"], of_form["reduce"])
