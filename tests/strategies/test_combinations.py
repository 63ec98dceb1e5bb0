"""Settings over which ranks, together: groups, copies in nodes, seldom joined replicas, hosts and matrix optimizers.

Each has a test of its own; here every two of them meet, on eight ranks or six. Rows that no other rule forbids train,
and equal one process; with `outer` a plain loop over K models. Muon turns a rounding into a third digit, so that with
`outer` such rows end with the first outer step, before which all is exact.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.oracle import Recipe, Rules, assert_same, outcome_of, train_oracle
from tests.strategies.engine import Ours
from tests.strategies.pairwise import Row, pairwise
from tests.strategies.test_kinds import WITH_MUON
from tests.strategies.test_outer import assert_close, outcome_of_replicas, plain_loop
from tests.strategies.test_parity import FLOAT32_ROUNDING, check_rows
from zeroexp.cut.engine_rules import why_no_secondary_copy, why_not_over_all
from zeroexp.cut.stage import STAGES
from zeroexp.zero.options import Options, OuterOptimizer

AXES: dict[str, Sequence[Any]] = {
    "stage": [name for name in STAGES if name != "ddp"],
    "layout": ["parameter", "tensor", "buffer"],
    "world_size": [8, 6],
    "replicas": [1, 2, 4, 3],
    "optimizer_over": ["group", "all"],
    "secondary_partition": [None, 2],
    "outer": [None, OuterOptimizer(2), OuterOptimizer(1, lr=1.0, momentum=0.0)],
    "offload": [None, "optimizer", "all"],
    "optimizer": ["adamw", "muon", "kinds"],
    "matrix_step": ["alltoall", "gather"],
    "transport": ["auto", "gloo", "native"],
    "unit": ["block", "module"],
    "keep": ["last", "none", "all"],
    "precision": ["fp32", "bf16_master"],
    "accumulation": [2, 1],
    "max_grad_norm": [None, 1e6],
    "model": ["toy", "reused"],
}
ALONE = {"replicas": 1, "optimizer_over": "group", "secondary_partition": None, "outer": None}
OF_OPTIONS = (*ALONE, "layout", "offload", "matrix_step", "transport", "unit", "keep")


def legal(row: Row) -> bool:
    """What rules/arguments allow, of rows that may lack values; and what has an exact answer."""
    given = {**ALONE, "offload": None, **row}
    stage, size, outer = given.get("stage"), given.get("world_size", 8), given["outer"]
    if size % given["replicas"] or size == given["replicas"] or (given["replicas"] == 1 and outer):
        return False
    if stage == "zero1_allreduce" and given["replicas"] > 1 and not outer:
        return False
    words = {name: given[name] for name in ("replicas", "outer", "offload")}
    if given["optimizer_over"] == "all" and why_not_over_all(Options(**words)):
        return False
    if (copies := given["secondary_partition"]) and (
        given["offload"] == "all"
        or why_no_secondary_copy(copies, STAGES[stage or "zero3"], size // given["replicas"])
    ):
        return False
    if outer and (given["offload"] or given.get("precision") == "bf16_master"):
        return False
    if given["offload"] == "all" and stage not in ("zero3", None):
        return False
    # A ring of three and more adds in an order of its own, three replicas divide by three: matrices make a digit of it.
    rounds = given.get("transport") == "native" or (outer and given["replicas"] == 3)
    return given.get("optimizer") not in ("muon", "kinds") or not (given["offload"] or rounds)


ROWS = pairwise(AXES, every=("stage", "replicas"), legal=legal)


def recipe_of(row: Row) -> Recipe:
    words = {name: row[name] for name in ("model", "world_size", "precision", "accumulation")}
    kinds = json.dumps(WITH_MUON) if row["optimizer"] == "kinds" else "{}"
    optimizer = "muon" if row["optimizer"] == "muon" else "adamw"
    num_outer = 2 if row["optimizer"] == "adamw" else 1
    steps = num_outer * row["outer"].every if row["outer"] else 3
    if (row["transport"], row["precision"]) == ("native", "bf16_master"):
        steps = 1
    words = {**words, "steps": steps, "max_grad_norm": row["max_grad_norm"]}
    return Recipe(**words, optimizer=optimizer, kinds=kinds)


def check(row: Row, recipe: Recipe, answers: list[Any]) -> None:
    if row["outer"]:
        assert_close(
            outcome_of_replicas(answers), plain_loop(recipe, row["replicas"], row["outer"])
        )
        return
    rules = Rules(replicas=row["replicas"])
    bound = FLOAT32_ROUNDING if row["transport"] == "native" else 0.0
    assert_same(outcome_of(answers), train_oracle(recipe, rules), rtol=bound, atol=bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "stage"), [(s, name) for s in AXES["world_size"] for name in AXES["stage"]]
)
def test_settings_that_meet_equal_one_process(ranks, size, stage):
    rows = [row for row in ROWS if (row["world_size"], row["stage"]) == (size, stage)]
    makes = [Ours(stage, Options(**{word: row[word] for word in OF_OPTIONS})) for row in rows]
    check_rows(ranks, rows, list(zip(map(recipe_of, rows), makes, strict=True)), check)
