"""Models, worlds and engines that nobody chose: each trains two steps and equals the oracle, bit for bit.

A failure prints all that was drawn. Nothing is shrunk: an engine that hangs would hang for every attempt at it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.oracle import assert_same, outcome_of
from tests.strategies.drawn import Drawn, drawn, oracle, train

FEW, MANY = 5, int(os.environ.get("ZEROEXP_DRAWN_MODELS", "600"))
without_shrinking = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def check(ranks: Any, one: Drawn) -> None:
    answers = ranks(train, one, world_size=one.recipe.world_size)
    assert_same(outcome_of(answers), oracle(one))


@pytest.mark.slow
@settings(without_shrinking, max_examples=FEW)
@given(one=drawn())
def test_a_drawn_model_trains_like_the_oracle(ranks, one):
    check(ranks, one)


@pytest.mark.wide
@pytest.mark.timeout(3600)
@settings(without_shrinking, max_examples=MANY, derandomize=False)
@given(one=drawn())
def test_many_drawn_models_train_like_the_oracle(ranks, one):
    check(ranks, one)
