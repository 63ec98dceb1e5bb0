"""Closed forms count the gathers that a model causes where no schedule alone tells them.

That they agree with rehearsals and real steps is in test_rehearse.py.
"""

from __future__ import annotations

import pytest

from tests.plan.real_steps import config_of
from zeroexp.plan.closed_forms import EngineForm
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.rehearse import rehearse

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


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["last", "all"])
def test_modules_of_recomputed_blocks_are_gathered_a_third_time(keep):
    """Both blocks of `tiny` have nine modules with parameters, and a norm follows; `last` keeps the root, `all` all.

    The module that a block runs last is gathered twice: its recomputation needs nothing that it returns. No list of
    modules says which one that is, so that the form counts one gather more.
    """
    schedule = ("strategy.unit=module", f"strategy.keep={keep}", "strategy.prefetch=1")
    recomputes = "train.activation_checkpointing=true"
    config = config_of("model=tiny", *STEP, *schedule, recomputes)
    form = form_of(config, build_on_meta(config), "gloo")
    assert isinstance(form, EngineForm)
    found = form.traffic(0).calls_by_kind["gather"]
    assert found == 2 * (len(form.units) if keep == "all" else 1 + 2 + 3 * 2 * 9)
    real = rehearse(config, ranks_per_host=1)
    more = found - real.traffic.calls_by_kind["gather"]
    assert more == (0 if keep == "all" else 2 * 2)
