"""A secondary copy inside each node (hpZ): which bytes leave a node, and until when it serves.

That it changes no bit of what is trained test_replicas.py says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.comm.test_issued import engine_of_nine_units
from tests.composing import composed
from tests.crossed import every_nth
from tests.models_for_tests import microbatch_of
from tests.oracle import Recipe, build_on_rank, outcome_of, pieces_of, run_steps
from tests.strategies.engine import Ours
from tests.strategies.test_codecs import assert_equal, train
from tests.strategies.test_replicas import issued_in_a_step
from zeroexp.check import check
from zeroexp.interface.canonical import merge
from zeroexp.process import world as worlds
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Options


def train_with_and_without(world: World, recipe: Recipe, options: Options):
    copied = replace(options, secondary_partition=2)
    return [train(world, "zero3", recipe, each) for each in (copied, options)]


# codecs of gathers and of reductions, layout, transport, precision
CODED = [
    ("int8", "int4", "buffer", "auto", "bf16_master"),
    ("int4", None, "tensor", "native", "fp32"),
    ("float8", "int8", "parameter", "gloo", "fp32"),
]


@every_nth(3, "case", CODED, ids=lambda case: "-".join(map(str, case)))
def test_codes_that_are_kept_stand_for_the_same_weights(ranks, case):
    """Two microbatches a step: backward and the second forward read what the first gather brought, codes and all."""
    gather, reduce, layout, transport, precision = case
    options = Options(layout=layout, transport=transport, gather_codec=gather, reduce_codec=reduce)
    recipe = Recipe(world_size=4, precision=precision, accumulation=2)
    answers = ranks(train_with_and_without, recipe, options, world_size=4)
    copied, plain = (outcome_of([ways[index] for ways in answers]) for index in range(2))
    assert_equal(copied, plain)


def gathers_after(world: World, happens: str) -> tuple[Counter[str], bool]:
    """The gathers of one more forward, by kind, and whether it computes with the weights that are held now."""
    options = Options(secondary_partition=2, keep="none", prefetch=0)
    recipe = Recipe(world_size=world.size, precision="bf16_master")
    strategy: Any = build_on_rank(world, recipe, Ours("zero3", options))
    run_steps(strategy, world, recipe, range(1))
    saved = merge(worlds.gather_objects(pieces_of(strategy)))
    _forward(strategy)
    if happens == "a step":
        run_steps(strategy, world, recipe, range(1, 2))
    elif happens == "a write":
        with strategy.gathered(write=True), torch.no_grad():
            for parameter in strategy.model.parameters():
                parameter.mul_(0.5)
    elif happens == "a load":
        run_steps(strategy, world, recipe, range(1, 2))
        _forward(strategy)
        strategy.load_state_dict(saved)
    strategy.wire.take_traffic()
    seen = _forward(strategy)
    calls = Counter(strategy.wire.take_traffic().calls_by_kind)
    with strategy.gathered():
        return calls, torch.equal(seen, _forward(strategy))


def _forward(strategy: Any) -> torch.Tensor:
    tokens, _ = microbatch_of(0, 0, 0)
    with torch.no_grad():
        return strategy.model(input_ids=tokens).clone()


@pytest.mark.parametrize("happens", ["nothing", "a step", "a write", "a load"])
def test_copies_serve_until_weights_change(ranks, happens):
    for calls, is_right in ranks(gathers_after, happens, world_size=4):
        assert is_right
        assert set(calls) == {"secondary" if happens == "nothing" else "gather"}


def test_what_the_backend_is_given_over_all_ranks_and_inside_of_a_node():
    """Bytes of whole collectives: of three times P over 8 ranks one time goes to nodes of 4 (keep=none)."""
    plain, num_bytes = issued_in_a_step("zero3", 8, keep="none")
    copied, _ = issued_in_a_step("zero3", 8, keep="none", secondary_partition=4)
    assert plain["_allgather_base_", 8] == 2 * num_bytes
    assert copied["_allgather_base_", 8] == copied["_allgather_base_", 4] == num_bytes
    assert copied["_reduce_scatter_base_", 8] == num_bytes
    changed = {name for name in {*plain, *copied} if plain.get(name) != copied.get(name)}
    assert changed == {("_allgather_base_", 8), ("_allgather_base_", 4)}


def test_messages_go_to_the_node_alone_but_for_one_gather_and_the_reduction():
    """Rank 5 of 8 in nodes of 4: P/8 to every rank, and P/4 to each of its node; of gradients P/8 to every rank."""
    options: dict[str, Any] = {"transport": "gloo", "keep": "none", "secondary_partition": 4}
    given, num_bytes = issued_in_a_step("zero3", 8, 5, **options)
    sent = {to: size for (name, to), size in given.items() if name == "send"}
    for rank in set(range(8)) - {5}:
        eighths = 1 + 1 + (2 if rank // 4 == 1 else 0)
        assert sent[rank] == pytest.approx(eighths * num_bytes / 8, rel=0.02), rank


def test_memory_of_the_copy_has_a_name_of_its_own():
    with fake_world(1, 8) as world:
        strategy = engine_of_nine_units("zero3", "buffer", world, secondary_partition=4)
        pieces, copies = (strategy.model_states().parameters, strategy.model_states().secondary)
        assert sum(c.nbytes for c in copies) == 2 * sum(p.nbytes for p in pieces)  # P/4 and P/8


NODES = "cluster=slurm cluster.slurm.ranks_per_node=4 world_size=8"


def test_a_copy_inside_of_the_nodes_that_are_named_is_accepted():
    line = f"{NODES} strategy=zero3 strategy.secondary_partition=2 data.global_batch_size=8"
    check(composed(*line.split()))
