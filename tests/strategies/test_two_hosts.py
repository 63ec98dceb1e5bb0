"""Three ranks, two of which share a host: the engine reads the one peer's memory and sends messages to the other."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.oracle import Outcome, Recipe, assert_same, outcome_of, train_on_ranks, train_oracle
from tests.strategies.engine import Ours
from zeroexp.sharding import shared_memory
from zeroexp.sharding.placement import STAGES
from zeroexp.strategies.base import CanonicalState
from zeroexp.strategies.sharded import Options, Sharded
from zeroexp.world import World

RECIPE = Recipe(world_size=3)


def train_on_two_hosts(
    world: World, runs: list[Ours]
) -> tuple[list[tuple[Outcome, CanonicalState]], list[bool]]:
    """What each engine made of the model, and whether it had a neighbour here."""
    host = "first" if world.rank < 2 else "second"
    shared_memory.host_identity = lambda: (host, 0)
    engines: list[Sharded] = []

    def make(run: Ours, *args: Any) -> Sharded:
        engines.append(run(*args))
        return engines[-1]

    trained = [train_on_ranks(world, RECIPE, lambda *a, run=run: make(run, *a)) for run in runs]
    return trained, [engine.shared_bytes > 0 for engine in engines]


@pytest.mark.parametrize("overlap", [True, False])
def test_some_peers_next_door_and_some_far_away_train_the_same_model(ranks, overlap):
    """A neighbour reads a reduction when it has launched as many more: with too few slots both would wait."""
    runs = [
        Ours(stage, Options(family=family, overlap=overlap))
        for stage, family in product(STAGES, ["parameter", "tensor", "buffer"])
    ]
    answers = ranks(train_on_two_hosts, runs, world_size=3)
    assert [set(shared) for _, shared in answers] == [{True}, {True}, {False}]
    expected = train_oracle(RECIPE)
    for index, run in enumerate(runs):
        outcome = outcome_of([trained[index] for trained, _ in answers])
        try:
            assert_same(outcome, expected, rtol=0.0, atol=0.0)
        except AssertionError as error:
            raise AssertionError(f"{run}: {error}") from error
