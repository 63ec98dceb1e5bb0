"""refusals/ observes and decides nothing: without it the engine trains the same model from right code."""

from unittest.mock import patch

from tests.oracle import Outcome, Recipe, assert_same, outcome_of, train_on_ranks, train_oracle
from tests.strategies.engine import Ours
from zeroexp.interface.strategy import CanonicalState
from zeroexp.process.world import World
from zeroexp.sharding import engine
from zeroexp.sharding.observer import Observer
from zeroexp.sharding.options import Options

RECIPE = Recipe(optimizer="adamw", max_grad_norm=1e6)  # never reached
STAGES = ("ddp", "zero1", "zero2", "zero3")


def train_unobserved(world: World) -> list[tuple[Outcome, CanonicalState]]:
    with patch.object(engine, "EngineRefusals", Observer):
        return [
            train_on_ranks(world, RECIPE, Ours(stage, Options(family="parameter")))
            for stage in STAGES
        ]


def test_the_engine_trains_the_same_model_unobserved(ranks):
    """That no other file imports refusals/, so that it could be deleted, test_architecture.py says."""
    answers = ranks(train_unobserved, world_size=2)
    for index, stage in enumerate(STAGES):
        outcome = outcome_of([answer[index] for answer in answers])
        assert_same(outcome, train_oracle(RECIPE))
        assert outcome.losses, stage
