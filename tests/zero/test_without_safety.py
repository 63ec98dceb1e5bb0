"""zero_safety/ observes and decides nothing: without it the engine trains the same model from right code."""

from tests.models_for_tests import MODELS
from tests.oracle import Outcome, Recipe, assert_same, outcome_of, train_on_ranks, train_oracle
from tests.strategies.engine import Ours
from zeroexp.interface.strategy import CanonicalState
from zeroexp.process.world import World, fake_world
from zeroexp.zero.engine import Engine
from zeroexp.zero.options import Options

RECIPE = Recipe(optimizer="adamw", max_grad_norm=1e6)  # never reached
STAGES = ("ddp", "zero1", "zero2", "zero3")


def train_unobserved(world: World) -> list[tuple[Outcome, CanonicalState]]:
    return [
        train_on_ranks(world, RECIPE, Ours(stage, Options(layout="parameter"), kind=Engine))
        for stage in STAGES
    ]


def test_an_unobserved_engine_shows_its_parameters_whole():
    with fake_world(0, 2) as world:
        built = MODELS[RECIPE.model].build()
        strategy = Ours("zero3", Options(transport="gloo"), kind=Engine)(built, RECIPE, world)
        shapes = {
            name: list(p.shape)
            for name, p in MODELS[RECIPE.model].build().module.named_parameters()
        }
        with strategy.gathered():
            assert {name: list(p.shape) for name, p in built.module.named_parameters()} == shapes


def test_the_engine_trains_the_same_model_unobserved(ranks):
    """That no other file imports zero_safety/, so that it could be deleted, test_architecture.py says."""
    answers = ranks(train_unobserved, world_size=2)
    for index, stage in enumerate(STAGES):
        outcome = outcome_of([answer[index] for answer in answers])
        assert_same(outcome, train_oracle(RECIPE))
        assert outcome.losses, stage
