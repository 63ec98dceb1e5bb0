"""Closed forms count the gathers that a model really causes: they, a rehearsal and real ranks agree.

Every point compares the bytes and calls of one step, by kind, and the bytes held at every named moment.
"""

from __future__ import annotations

import itertools

import pytest

from tests.composing import composed
from tests.plan.real_steps import agree, among_peers, quick_or_slow
from zeroexp.config.keys import Config
from zeroexp.plan.closed_forms import ShardedForm
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.rehearse import rehearse

NUM_RANKS = 2
MODELS = ("tiny", "gpt2_tiny", "mixtral_tiny")
KEEPS = ("none", "last", "all")


def config_of(model: str, *words: str, accumulation: int = 2) -> Config:
    batch = f"data.global_batch_size={NUM_RANKS * accumulation}"
    size = (f"world_size={NUM_RANKS}", batch, "data.micro_batch_size=1", "data.seq_len=8")
    return composed(f"model={model}", "data=synthetic", "strategy=zero3", *size, *words)


def by_module(model: str, keep: str, prefetch: int, accumulation: int, *words: str) -> Config:
    strategy = ("strategy.unit=module", f"strategy.keep={keep}", f"strategy.prefetch={prefetch}")
    return config_of(model, *strategy, *words, accumulation=accumulation)


def sharded_form(config: Config, transport: str) -> ShardedForm:
    form = form_of(config, build_on_meta(config), transport)
    assert isinstance(form, ShardedForm)
    return form


def check(ranks, config: Config, transport: str) -> None:
    """gloo: a rehearsal, and ranks of two hosts. direct: ranks of one host."""
    expected = sharded_form(config, transport)
    per_host = 1 if transport == "gloo" else NUM_RANKS
    if transport == "gloo":  # a rehearsal has shared memory in its peaks alone
        (rehearsed,) = rehearse(config, ranks=[NUM_RANKS - 1], reads=True, ranks_per_host=per_host)
        agree(rehearsed, expected)
    for rank in ranks(among_peers, config, per_host, world_size=NUM_RANKS):
        agree(rank, expected)


QUICK = [
    ("tiny", "last", 1, 2, "gloo"),
    ("tiny", "last", 6, 1, "direct"),  # a norm shares its pool with a unit that a step begins with
    ("gpt2_tiny", "none", 2, 1, "direct"),
    ("mixtral_tiny", "last", 1, 2, "direct"),
]
MATRIX = itertools.product(MODELS, KEEPS, (0, 1, 2, 6), (1, 3), ("gloo", "direct"))


@pytest.mark.parametrize(
    ("model", "keep", "prefetch", "accumulation", "transport"), quick_or_slow(QUICK, [*MATRIX])
)
def test_modules_in_the_order_in_which_they_run(
    ranks, model, keep, prefetch, accumulation, transport
):
    check(ranks, by_module(model, keep, prefetch, accumulation), transport)


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_ranks_of_a_host_share_memory_where_others_are_far_away(ranks, stage):
    """Their slots are as many as messages in flight need."""
    config = config_of("tiny", f"strategy={stage}", "world_size=4", "data.global_batch_size=4")
    expected = sharded_form(config, "mixed")
    for rank in ranks(among_peers, config, 2, world_size=4):
        agree(rank, expected)


@pytest.mark.parametrize(
    ("unit", "keep"), quick_or_slow([("block", "last")], [("module", keep) for keep in KEEPS])
)
def test_units_below_all_gradients_have_no_backward(ranks, unit, keep):
    """LLaMA's first layer and all before it: no gradient goes there."""
    config = config_of("tiny", f"strategy.unit={unit}", f"strategy.keep={keep}")
    config.model.freeze = ["*embed*", "*layers.0.*"]
    check(ranks, config, "direct" if unit == "block" else "gloo")


# -- how often -------------------------------------------------------------------------------------


def num_gathers(config: Config) -> int:
    return sharded_form(config, "gloo").traffic(0).calls_by_kind["gather"]


def test_what_is_listed_before_the_first_trainable_parameter_has_no_backward():
    """Of six blocks the first three are frozen, and all below them."""
    words = ("strategy.keep=none", "model.hf_config.num_hidden_layers=6")
    config = config_of("tiny", *words, accumulation=3)
    config.model.freeze = ["*embed*", "*layers.[0-2].*"]
    assert num_gathers(config) == 3 * sum((2, 1, 1, 1, 2, 2, 2))


@pytest.mark.parametrize("keep", ["last", pytest.param("all", marks=pytest.mark.slow)])
def test_modules_of_recomputed_blocks_are_gathered_a_third_time(keep):
    """Both blocks of `tiny` have nine modules with parameters, and a norm follows; `last` keeps the root, `all` all.

    The module that a block runs last is gathered twice: its recomputation needs nothing that it returns. No list of
    modules says which one that is, so that the form counts one gather more.
    """
    config = by_module("tiny", keep, 1, 2, "train.activation_checkpointing=true")
    found, num_units = num_gathers(config), len(sharded_form(config, "gloo").units)
    assert found == 2 * (num_units if keep == "all" else 1 + 2 + 3 * 2 * 9)
    (real,) = rehearse(config, ranks=[0], ranks_per_host=1)
    more = found - real.traffic.calls_by_kind["gather"]
    assert more == (0 if keep == "all" else 2 * 2)


def test_a_model_that_asks_for_values_is_gathered_as_a_plain_one():
    config = config_of("moe_tiny", accumulation=3)
    num_units = len(sharded_form(config, "gloo").units)
    assert num_gathers(config) == 3 * (1 + 2 * (num_units - 1))
