"""Closed forms count the gathers that a model really causes: they, a rehearsal and two ranks agree.

Every point compares the bytes and calls of one step, by kind, and the bytes held at every named moment.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import cast

import pytest

from tests.composing import composed
from tests.plan.test_rehearse import Zeros, agree
from zeroexp.comm import shared_memory
from zeroexp.config.keys import Config
from zeroexp.engines.build import build_strategy
from zeroexp.measure.instruments import Instruments
from zeroexp.models.checkpointing import checkpoint_blocks
from zeroexp.models.module import build_model
from zeroexp.plan.closed_forms import ShardedForm
from zeroexp.plan.extrapolate_depth import with_depth
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.rehearse import UNDISTURBED_STEP, RehearsedRank, prepared, rehearse
from zeroexp.process.world import World, barrier
from zeroexp.training.loop import Data, train

NUM_RANKS = 2
MODELS = ("tiny", "gpt2_tiny", "mixtral_tiny")
KEEPS = ("none", "last", "all")
# LLaMA's first layer and all before it: no gradient goes there.
BELOW_GRADIENTS = ("*embed*", "*layers.0.*")


def config_of(model: str, *words: str, accumulation: int = 2) -> Config:
    batch = f"data.global_batch_size={NUM_RANKS * accumulation}"
    size = (f"world_size={NUM_RANKS}", batch, "data.micro_batch_size=1", "data.seq_len=8")
    return composed(f"model={model}", "data=synthetic", "strategy=zero3", *size, *words)


def by_module(model: str, keep: str, prefetch: int, accumulation: int, *words: str) -> Config:
    strategy = ("strategy.unit=module", f"strategy.keep={keep}", f"strategy.prefetch={prefetch}")
    return config_of(model, *strategy, *words, accumulation=accumulation)


def trained_rank(world: World, config: Config, ranks_per_host: int) -> RehearsedRank:
    """Train among real peers and return what the rank sent and held."""
    host = world.rank // ranks_per_host
    same_host, shared_memory.host_identity = shared_memory.host_identity, lambda: (str(host), 0)
    try:
        model = build_model(config.model, seed=0, device="cpu", vocab_size=config.data.vocab_size)
        if config.train.activation_checkpointing:
            checkpoint_blocks(model.module, model.blocks)
        strategy = build_strategy(config, model, world)
        instruments, data = Instruments(config.train, world, Path()), cast(Data, Zeros(config))
        records = [*train(strategy, data, config=config, world=world, instruments=instruments)]
        barrier()  # no rank closes its connections while another still reads
    finally:
        shared_memory.host_identity = same_host  # these processes run other tests too
    held = records[-1].memory_bytes
    assert held is not None
    return RehearsedRank(world.rank, {}, held, records[UNDISTURBED_STEP].traffic)


def check(ranks, config: Config, transport: str) -> None:
    """gloo: a rehearsal, and ranks of two hosts. direct: ranks of one host."""
    expected = form_of(config, build_on_meta(config), transport)
    assert isinstance(expected, ShardedForm)
    per_host = 1 if transport == "gloo" else NUM_RANKS
    if transport == "gloo":  # a rehearsal has shared memory in its peaks alone
        (rehearsed,) = rehearse(config, ranks=[NUM_RANKS - 1], ranks_per_host=per_host).ranks
        agree(rehearsed, expected)
    for rank in ranks(trained_rank, prepared(config, None), per_host, world_size=NUM_RANKS):
        agree(rank, expected)


QUICK = [
    ("tiny", "last", 1, 2, "gloo"),
    ("tiny", "last", 6, 1, "direct"),  # a norm shares its pool with a unit that a step begins with
    ("gpt2_tiny", "none", 2, 1, "direct"),
    ("mixtral_tiny", "last", 1, 2, "direct"),
]
MATRIX = itertools.product(MODELS, KEEPS, (0, 1, 2, 6), (1, 3), ("gloo", "direct"))


@pytest.mark.parametrize(
    ("model", "keep", "prefetch", "accumulation", "transport"),
    [
        *QUICK,
        *(pytest.param(*each, marks=pytest.mark.slow) for each in MATRIX if each not in QUICK),
    ],
)
def test_modules_in_the_order_in_which_they_run(
    ranks, model, keep, prefetch, accumulation, transport
):
    check(ranks, by_module(model, keep, prefetch, accumulation), transport)


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_ranks_of_a_host_share_memory_where_others_are_far_away(ranks, stage):
    """Their slots are as many as messages in flight need, and a pool maps the rank's own section."""
    config = config_of("tiny", f"strategy={stage}", "world_size=4", "data.global_batch_size=4")
    expected = form_of(config, build_on_meta(config), "mixed")
    assert isinstance(expected, ShardedForm)
    for rank in ranks(trained_rank, prepared(config, None), 2, world_size=4):
        agree(rank, expected)


BY_BLOCK = [("block", "last"), *(pytest.param("module", k, marks=pytest.mark.slow) for k in KEEPS)]


@pytest.mark.parametrize(("unit", "keep"), BY_BLOCK)
def test_units_below_all_gradients_have_no_backward(ranks, unit, keep):
    config = config_of("tiny", f"strategy.unit={unit}", f"strategy.keep={keep}")
    config.model.freeze = [*BELOW_GRADIENTS]
    check(ranks, config, "direct" if unit == "block" else "gloo")


# -- how often -------------------------------------------------------------------------------------


def test_what_is_listed_before_the_first_trainable_parameter_has_no_backward():
    """Of six blocks the first three are frozen, and all below them."""
    config = with_depth(config_of("tiny", "strategy.keep=none", accumulation=3), 6)
    config.model.freeze = ["*embed*", "*layers.[0-2].*"]
    form = form_of(config, build_on_meta(config), "gloo")
    assert isinstance(form, ShardedForm)
    assert form.traffic(0).calls_by_kind["gather"] == 3 * sum((2, 1, 1, 1, 2, 2, 2))


@pytest.mark.parametrize("keep", ["last", "all"])
def test_modules_of_recomputed_blocks_are_gathered_a_third_time(keep):
    """Both blocks of `tiny` have nine modules with parameters, and a norm follows; `last` keeps the root, `all` all.

    The module that a block runs last is gathered twice: its recomputation needs nothing that it returns. No list of
    modules says which one that is, so that the form counts one gather more.
    """
    config = by_module("tiny", keep, 1, 2, "train.activation_checkpointing=true")
    form = form_of(config, build_on_meta(config), "gloo")
    assert isinstance(form, ShardedForm)
    found = form.traffic(0).calls_by_kind["gather"]
    assert found == 2 * (len(form.units) if keep == "all" else 1 + 2 + 3 * 2 * 9)
    real = rehearse(config, ranks=[0], ranks_per_host=1).ranks[0].traffic.calls_by_kind["gather"]
    assert found - real == (0 if keep == "all" else 2 * 2)


def test_a_model_that_asks_for_values_is_gathered_as_a_plain_one():
    config = config_of("moe_tiny", accumulation=3)
    form = form_of(config, build_on_meta(config), "gloo")
    assert isinstance(form, ShardedForm)
    assert form.traffic(0).calls_by_kind["gather"] == 3 * (1 + 2 * (len(form.units) - 1))
