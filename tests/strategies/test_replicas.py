"""Replicas are groups of ranks that hold all states each, sharded inside. One process that adds by groups is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.oracle import Rules, assert_same, outcome_of, train_oracle
from tests.strategies.pairwise import Row, pairwise
from tests.strategies.test_parity import AXES, legal, ours, recipe_of, tolerance, train_rows
from zeroexp.cut.stage import STAGES

STAGES_IN_GROUPS = [name for name in STAGES if name != "ddp"]
MESH: dict[str, Any] = {**AXES, "stage": STAGES_IN_GROUPS, "world_size": [4], "replicas": [2]}
ROWS = pairwise(MESH, every=("stage", "family", "transport"), legal=legal)


def rules_of(row: Row) -> Rules:
    # What rests replicated is summed over all ranks in every microbatch that is reduced.
    each = row["reduce_each"] if row["stage"] == "zero1_allreduce" else "step"
    return Rules(row["reduce_each"], replicas=row["replicas"], groups_each=each)


def check(ranks: Any, rows: list[Row]) -> None:
    makes = [ours(row) for row in rows]
    makes = [
        replace(make, options=replace(make.options, replicas=row["replicas"]))
        for make, row in zip(makes, rows, strict=True)
    ]
    recipes = [recipe_of(row) for row in rows]
    answers = ranks(
        train_rows, list(zip(recipes, makes, strict=True)), world_size=rows[0]["world_size"]
    )
    for index, (row, recipe) in enumerate(zip(rows, recipes, strict=True)):
        bound = tolerance({**row, "world_size": 2}, recipe)  # a ring of two adds in any order
        expected = train_oracle(replace(recipe, checkpointing=False), rules_of(row))
        try:
            outcome = outcome_of([answer[index] for answer in answers])
            assert_same(outcome, expected, rtol=bound, atol=bound)
        except AssertionError as error:
            raise AssertionError(f"{row}: {error}") from error


@pytest.mark.parametrize("stage", STAGES_IN_GROUPS)
def test_two_groups_of_two_equal_one_process(ranks, stage):
    """Every stage x layout x transport; accumulation, clipping and all other settings by pairs."""
    check(ranks, [row for row in ROWS if row["stage"] == stage])
