"""Three ranks, two of which share a host: the engine reads the one peer's memory and sends messages to the other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.oracle import (
    Outcome,
    Recipe,
    Rules,
    assert_same,
    outcome_of,
    train_on_ranks,
    train_oracle,
)
from tests.plan.real_steps import config_of
from tests.strategies.engine import Ours
from zeroexp.comm import direct
from zeroexp.cut.stage import STAGES
from zeroexp.engines.build import build_strategy
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.strategy import CanonicalState
from zeroexp.models.module import build_model
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.machines import machines_of
from zeroexp.process.world import World
from zeroexp.zero.options import Options

RECIPE = Recipe(world_size=3, steps=2)


def train_on_two_hosts(
    world: World, runs: list[Ours], num_on_first: int, recipe: Recipe = RECIPE
) -> tuple[list[tuple[Outcome, CanonicalState]], list[tuple[bool, int]], list[int]]:
    """What each engine made of the model; whether it shares memory, and how many reductions may be under way; a
    checksum of its moves.
    """
    host = "first" if world.rank < num_on_first else "second"
    same_host, direct.neighbour_identity = direct.neighbour_identity, lambda: (host,)
    engines: list[Sharded] = []

    def make(run: Ours, *args: Any) -> Sharded:
        engines.append(run(*args))
        return engines[-1]

    try:
        trained = [train_on_ranks(world, recipe, partial(make, run)) for run in runs]
    finally:
        direct.neighbour_identity = same_host  # these processes run other tests too
    roads = [(e.wire.held_shared_bytes > 0, e.wire.traits.reductions_in_flight) for e in engines]
    return trained, roads, [e.wire._moves.checksum for e in engines]


def bytes_of_slots(world: World, words: list[str], ranks_per_node: int) -> int:
    config = config_of(*words)
    model = build_model(config.model, seed=0, device=world.device)
    host = world.rank // ranks_per_node
    same_host, direct.neighbour_identity = direct.neighbour_identity, lambda: (host,)
    try:
        engine = build_strategy(config, model, world)
    finally:
        direct.neighbour_identity = same_host
    return engine.model_states().hidden_bytes


@pytest.mark.parametrize(
    ("num_nodes", "replicas"), [(2, 3), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_a_plan_knows_which_ranks_of_groups_across_hosts_share_memory(ranks, num_nodes, replicas):
    """Of groups of two on hosts of three one lies on both hosts: its ranks have no slots for what they sum there."""
    link = (f"cluster.nodes={num_nodes}", "cluster.link=1gbit", "cluster.device=cpu")
    words = ["model=mlp_tiny", "data=vectors", "strategy=zero1", "world_size=6", *link]
    words += [f"strategy.replicas={replicas}", "data.global_batch_size=6"]
    config = config_of(*words)
    transports = machines_of(config, "cpu").transports(config.grid)
    form = form_of(config, build_on_meta(config), *transports)
    planned = [form.held_bytes("at_rest", rank)["buffers"] for rank in range(6)]
    assert ranks(bytes_of_slots, words, 6 // num_nodes, world_size=6) == planned
    assert len(set(planned)) > 1


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_groups_that_lie_differently_on_hosts_count_the_same_moves(ranks, stage):
    """One of two has its ranks on one host, the other on both: a pause must not pass for ranks that differ."""
    runs, recipe = [Ours(stage, Options(replicas=2))], replace(RECIPE, world_size=4)
    answers = ranks(train_on_two_hosts, runs, 3, recipe, world_size=4)
    assert len({tuple(moves) for *_, moves in answers}) == 1


def test_matrices_are_stepped_where_one_rank_is_alone_on_its_host(ranks):
    """Ranks that share memory exchange matrices by messages, and so does the one that shares none."""
    recipe = replace(RECIPE, optimizer="muon")
    answers = ranks(train_on_two_hosts, [Ours("zero1", Options())], 2, recipe, world_size=3)
    outcome = outcome_of([trained for (trained,), *_ in answers])
    assert_same(outcome, train_oracle(recipe, Rules()))


LAYOUT_NAMES = ("buffer", "tensor", "parameter")
TWO_HOSTS, ONE_HOST = [(True, 2), (True, 2), (False, 2)], [(True, 1)] * 3


@pytest.mark.parametrize(
    ("num_on_first", "expected", "overlap", "layouts"),
    [
        pytest.param(2, TWO_HOSTS, True, LAYOUT_NAMES[1:2], id="two_hosts-tensor"),
        pytest.param(2, TWO_HOSTS, True, LAYOUT_NAMES, id="two_hosts-True", marks=pytest.mark.slow),
        pytest.param(
            2, TWO_HOSTS, False, LAYOUT_NAMES, id="two_hosts-False", marks=pytest.mark.slow
        ),
        # What a layout moves is of no matter for how many reductions are under way.
        pytest.param(
            3, ONE_HOST, False, LAYOUT_NAMES[:1], id="one_host-False", marks=pytest.mark.slow
        ),
    ],
)
def test_some_peers_next_door_and_some_far_away_train_the_same_model(
    ranks, num_on_first, expected, overlap, layouts
):
    """With fewer slots than reductions under way and one, neighbours would wait for each other for ever."""
    runs = [
        Ours(stage, Options(layout=layout, overlap=overlap, reduce_each=reduce_each))
        for stage, layout in product(STAGES, layouts)
        for reduce_each in (["step"] if stage == "zero1" else ["step", "microbatch"])
    ]
    answers = ranks(train_on_two_hosts, runs, num_on_first, world_size=3)
    for (_, roads, moves), road in zip(answers, expected, strict=True):
        assert set(roads) == {road}
        assert moves == answers[0][2], "no rank is taken for one that differs"
    oracles = {each: train_oracle(RECIPE, Rules(each)) for each in ("step", "microbatch")}
    for index, run in enumerate(runs):
        outcome = outcome_of([trained[index] for trained, *_ in answers])
        try:
            assert_same(outcome, oracles[run.options.reduce_each], rtol=0.0, atol=0.0)
        except AssertionError as error:
            raise AssertionError(f"{run}: {error}") from error
