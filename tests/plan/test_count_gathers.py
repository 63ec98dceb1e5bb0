"""Closed forms count the gathers that a model really causes: they, a rehearsal and two ranks agree.

Every point compares the bytes and calls of one step, by kind, and the bytes held at every named moment.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import cast

import pytest
from torch import nn

from tests.composing import composed
from tests.plan.test_rehearse import Zeros, agree
from zeroexp.comm import shared_memory
from zeroexp.config.keys import Config
from zeroexp.engines.build import build_strategy
from zeroexp.measure.instruments import Instruments
from zeroexp.models.checkpointing import checkpoint_blocks
from zeroexp.models.module import BuiltModel, build_model
from zeroexp.plan import count_gathers
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


@pytest.mark.parametrize(
    ("keep", "prefetch", "transport"),
    [
        ("last", 1, "direct"),
        *(pytest.param("none", n, "gloo", marks=pytest.mark.slow) for n in (0, 1, 2, 4)),
    ],
)
def test_modules_of_recomputed_blocks_are_gathered_a_third_time(ranks, keep, prefetch, transport):
    words = "train.activation_checkpointing=true"
    check(ranks, by_module("tiny", keep, prefetch, 2, words), transport)


# -- how often -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_one_block_tells_of_all_between_the_first_and_the_last(model, recomputes):
    words = f"train.activation_checkpointing={recomputes}"
    config = with_depth(by_module(model, "last", 1, 2, words), 7)
    config.model.freeze = ["*ln_1*" if model == "gpt2_tiny" else "*norm*"]
    whole, shallow = build_on_meta(config), build_on_meta(config)
    ran = count_gathers.leave_out_alike(shallow, 2)
    assert (len(whole.blocks), len(shallow.blocks), len(ran)) == (7, 5, 7)
    expected = count_gathers._run(config, whole)
    assert [count_gathers._repeated(c, ran) for c in count_gathers._run(config, shallow)] == [
        *expected
    ]


def test_blocks_that_differ_all_run():
    """Of six blocks the first three are frozen, and all below them: they have no backward."""
    config = with_depth(config_of("tiny", "strategy.keep=none", accumulation=3), 6)
    config.model.freeze = ["*embed*", "*layers.[0-2].*"]
    form = form_of(config, build_on_meta(config), "gloo")
    assert isinstance(form, ShardedForm)
    assert form.gathers == [3 * num for num in (2, 1, 1, 1, 2, 2, 2)]


@pytest.mark.parametrize("differs", [False, True])
def test_a_block_of_another_kind_runs_too(differs):
    """A plain setting of a block may change the order inside."""
    model = nn.ModuleDict(
        {"blocks": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in "01234")}
    )
    blocks = [f"blocks.{i}" for i in range(5)]
    if differs:
        model.get_submodule("blocks.3").runs_backwards = True
    ran = count_gathers.leave_out_alike(BuiltModel(model, [*blocks]), 1)
    assert [*ran.values()] == ([] if differs else [blocks[i] for i in (0, 1, 1, 1, 2)])
    assert len(model["blocks"]) == (5 if differs else 3)


def test_a_model_that_asks_for_values_is_gathered_as_a_plain_one():
    config = config_of("moe_tiny", accumulation=3)
    form = form_of(config, build_on_meta(config), "gloo")
    assert isinstance(form, ShardedForm) and form.gathers is None
    assert form.traffic(0).calls_by_kind["gather"] == 3 * (1 + 2 * (len(form.units) - 1))
