"""Every hand-written strategy equals one process that does the obvious thing: bit for bit where arithmetic allows.

It does not allow it where
* gloo's own collectives sum in the order of their ring (`native`, from three ranks on),
* clipping scales: the norm is summed piece by piece, so that the coefficient may differ in its last bit,
* an optimizer's kernel rounds the elements behind the last full vector of a tensor in another way, and a cut inside a
  parameter moves which those are: so does the *fused* AdamW, and SGD on bfloat16 masters. The loop AdamW is exact,
* moments are rounded: what differed by a rounding differs in the third digit (such rows are left out),
* a product with a matrix of one row (one token alone with its expert) is rounded by where in memory the weights lie.
There gradients and weights agree up to a few roundings. With bfloat16 parameters such a difference is carried into
the next forward 2^-8 large, so those rows take one step only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from tempfile import gettempdir
from typing import Any

import pytest

from tests.crossed import every_nth
from tests.oracle import (
    PRECISIONS,
    Outcome,
    Recipe,
    Rules,
    assert_same,
    outcome_of,
    train_on_ranks,
    train_oracle,
)
from tests.strategies.engine import Ours
from tests.strategies.pairwise import Row, pairwise
from zeroexp.cut.stage import STAGES
from zeroexp.interface.strategy import CanonicalState
from zeroexp.process.world import World
from zeroexp.zero.options import MIB, Options

AXES: dict[str, Sequence[Any]] = {
    "stage": list(STAGES),
    "layout": ["parameter", "tensor", "buffer"],
    "world_size": [1, 2, 3],
    "transport": ["direct", "gloo", "native"],
    "unit": ["block", "module", "model", "layer"],
    "precision": ["fp32", "bf16", "bf16_master", "paper16"],
    "accumulation": [2, 1, 3],
    "reduce_each": ["step", "microbatch"],
    "overlap": [True, False],
    "keep": ["last", "none", "all"],
    "prefetch": [None, 1, 2, 0],
    # None; several to a unit, and long parameters in several; one where small members come last; less than a parameter
    "bucket_mb": [None, 600 / MIB, 1400 / MIB, 40 / MIB],
    "owners": ["greedy", "contiguous"],
    "offload": [None, "optimizer", "all"],
    "offload_fraction": [1.0, 0.4],
    "offload_folder": [None, gettempdir()],
    "optimizer": ["adamw_loop", "adamw_fused", "sgd"],
    "moments": [None, "bfloat16"],
    "max_grad_norm": [None, 1e6, 0.1],  # 1e6 is never reached, 0.1 always
    "checkpointing": [False, True],
    "model": ["toy", "reused", "words"],  # the last has more words than a microbatch has tokens
}
CELL = ("stage", "layout", "world_size")
PRECISION = ("fp32", "bf16_master")
FLOAT32_ROUNDING = 2e-5  # of the 0.04 to 0.06 an element can go in two or three steps of AdamW
ONE_STEP_ROUNDING = {"float32": 1e-6, "bfloat16": 2**-7}  # by dtype of the master


def legal(row: Row) -> bool:
    if (row.get("stage"), row.get("reduce_each")) == ("zero1", "microbatch"):
        return False  # partial gradients are reduced once, or they would not be partial
    if row.get("offload") == "all" and not may_rest_on_host(row):
        return False
    if row.get("offload", "all") is None and not is_on_device(row):
        return False
    # Sums of bfloat16 in the order of a ring agree in a few bits only, and so do moments that are rounded where a
    # gradient differs in its last bit: nothing to compare.
    rounded = row.get("precision") in ("bf16", "paper16")
    in_a_ring = row.get("transport") == "native" and row.get("world_size") in (3, 4)
    if row.get("moments") is None:
        return not (in_a_ring and rounded)
    bfloat16_sgd = row.get("optimizer") == "sgd" and rounded
    return not (in_a_ring or bfloat16_sgd or row.get("max_grad_norm") == 0.1)


def may_rest_on_host(row: Row) -> bool:
    """Whether the row's parameters rest sharded, and do not lie in memory that ranks share."""
    return row.get("stage") in ("zero3", None) and row.get("transport") != "direct"


def is_on_device(row: Row) -> bool:
    return row.get("offload_fraction", 1) == 1 and row.get("offload_folder") is None


def is_exact(row: Row) -> bool:
    if row["max_grad_norm"] == 0.1 or row["model"] == "moe_one_rank":
        return False
    if row["transport"] == "native" and row["world_size"] > 2:
        return False
    cut = row["layout"] != "parameter" and row["stage"] != "ddp" and row["world_size"] > 1
    on_bfloat16 = PRECISIONS[row["precision"]].master == "bfloat16"
    # Moments that are rounded do without the fused kernel.
    has_tail = row["optimizer"] == "adamw_fused" and row["moments"] is None
    has_tail |= row["optimizer"] == "sgd" and on_bfloat16
    return not (cut and has_tail)


def recipe_of(row: Row) -> Recipe:
    one_step = not is_exact(row) and PRECISIONS[row["precision"]].compute == "bfloat16"
    return Recipe(
        model=row["model"],
        world_size=row["world_size"],
        # The second has all that a first one leaves, and a third shows how moments were rounded.
        steps=1 if one_step else 2 + bool(row["moments"]),
        accumulation=row["accumulation"],
        precision=row["precision"],
        optimizer=row["optimizer"].partition("_")[0],
        fused=row["optimizer"] == "adamw_fused",
        moments=row["moments"],
        max_grad_norm=row["max_grad_norm"],
        checkpointing=row["checkpointing"],
    )


def tolerance(row: Row, recipe: Recipe) -> float:
    if is_exact(row):
        return 0.0
    master = PRECISIONS[row["precision"]].master
    return FLOAT32_ROUNDING if recipe.steps > 1 else ONE_STEP_ROUNDING[master]


def ours(row: Row) -> Ours:
    words = ("layout", "owners", "unit", "overlap", "prefetch", "keep", "reduce_each", "bucket_mb")
    named = (*words, "transport", "offload", "offload_fraction", "offload_folder")
    return Ours(row["stage"], Options(**{word: row[word] for word in named}))


@cache
def oracle(recipe: Recipe, reduce_each: str) -> Outcome:
    return train_oracle(replace(recipe, checkpointing=False), Rules(reduce_each))


def train_rows(
    world: World, runs: list[tuple[Recipe, Ours]]
) -> list[tuple[Outcome, CanonicalState]]:
    return [train_on_ranks(world, recipe, make) for recipe, make in runs]


def check_rows(
    ranks: Any, rows: Sequence[Row], runs: list[tuple[Recipe, Ours]], check: Any
) -> None:
    """Train rows of one world size; `check` gets each with its recipe and its answers, and a failure names it."""
    answers = ranks(train_rows, runs, world_size=rows[0]["world_size"])
    for index, (row, (recipe, _)) in enumerate(zip(rows, runs, strict=True)):
        try:
            check(row, recipe, [answer[index] for answer in answers])
        except AssertionError as error:
            raise AssertionError(f"{row}: {error}") from error


def check(ranks: Any, rows: Sequence[Row]) -> None:
    """All of one world size."""

    def is_that_of_one_process(row: Row, recipe: Recipe, answers: Any) -> None:
        bound = tolerance(row, recipe)
        expected = oracle(recipe, row["reduce_each"])
        assert_same(outcome_of(answers), expected, rtol=bound, atol=bound)

    check_rows(ranks, rows, [(recipe_of(row), ours(row)) for row in rows], is_that_of_one_process)


def cell_of(row: Row) -> str:
    return "-".join(str(row[name]) for name in CELL)


def by_cell(rows: Sequence[Row]) -> dict[str, list[Row]]:
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(cell_of(row), []).append(row)
    return cells


# Blocks of 8-bit moments, on two ranks to four, are none of them cut, whatever carries or steps them.
IN_BLOCKS = [
    {name: values[0] for name, values in AXES.items()}
    | {"stage": stage, "layout": layout, "world_size": 2 + (index + index // 3) % 3}
    | {"moments": "int8", "model": "large"}
    | {"optimizer": AXES["optimizer"][(index + index // 3) % 3]}
    | {name: AXES[name][index // 3 % 2] for name in ("transport", "unit", "bucket_mb")}
    | {"offload": "optimizer" if index % 4 == 3 else None, "precision": PRECISION[index % 2]}
    for index, (stage, layout) in enumerate(product(STAGES, AXES["layout"]))
]
# Three things at once, which pairs leave out: a kernel steps the elements behind the last full vector of a piece.
TAILS = {name: values[0] for name, values in AXES.items()}
TAILS |= {"stage": "zero3", "layout": "buffer", "world_size": 3, "precision": "bf16_master"}
TAILS |= {"optimizer": "adamw_fused", "moments": "bfloat16", "model": "reused"}
PAIRS = by_cell([*pairwise(AXES, every=("stage", "layout"), legal=legal), *IN_BLOCKS[::4], TAILS])
OF_EVERY_CELL = by_cell([*pairwise(AXES, every=CELL, legal=legal), *IN_BLOCKS])


@pytest.mark.parametrize("cell", PAIRS)
def test_equals_the_oracle(ranks, cell):
    """Every stage x layout; all other settings by pairs."""
    check(ranks, PAIRS[cell])


@pytest.mark.slow
@pytest.mark.parametrize("cell", OF_EVERY_CELL)
def test_every_cell_equals_the_oracle(ranks, cell):
    """Every stage x layout x world size; all other settings by pairs."""
    check(ranks, OF_EVERY_CELL[cell])


EVERY = (*CELL, "transport", "unit", "reduce_each", "overlap")


CELLS = [
    pytest.param(cell, marks=pytest.mark.slow if cell == "zero3-buffer-3" else pytest.mark.wide)
    for cell in OF_EVERY_CELL
]


@pytest.mark.parametrize("cell", CELLS)
def test_full_matrix_equals_the_oracle(ranks, cell):
    """Also every transport x unit x accumulation mode x overlap; the others by pairs within the cell."""
    mine = {
        name: [OF_EVERY_CELL[cell][0][name]] if name in CELL else values
        for name, values in AXES.items()
    }
    check(ranks, pairwise(mine, every=EVERY, legal=legal))


MODELS = ["llama", "gpt2", "mixtral", "moe_one_rank", "moe_all_ranks", "moe_by_turns"]


@every_nth(
    2,
    "model, world_size",
    [*((model, 2) for model in MODELS), ("moe_by_turns", 3), ("moe_one_rank", 3)],
)
def test_real_architectures_equal_the_oracle(ranks, model, world_size):
    """Tied LLaMA, GPT-2 and Mixtral of transformers, and experts that are not even called: under ZeRO-3 and two stages
    more, in turns; tests/strategies/test_shipped_models.py has others.
    """
    plain = {name: values[0] for name, values in AXES.items()}
    layouts, units = ["buffer", "tensor", "parameter"], ["block", "layer", "module"]
    turn = MODELS.index(model) + world_size
    rows = [
        {
            **plain,
            "stage": stage,
            "layout": layouts[(index + world_size) % 3],
            "unit": units[(index + MODELS.index(model)) % 3],
            "world_size": world_size,
            "model": model,
        }
        for index, stage in enumerate(STAGES)
        if stage == "zero3" or (index + turn) % 2
    ]
    check(ranks, rows)


def test_gradients_of_many_bfloat16_microbatches_add_up_in_float32(ranks):
    """`precision=bf16_master` says so. Sums of bfloat16 keep three digits: 8e-3 off here, and the norm with them."""
    recipe = Recipe(accumulation=16, steps=1, precision="bf16_master", optimizer="sgd")
    ways = [(stage, None) for stage in STAGES] + [("zero2", "microbatch"), ("zero3", "microbatch")]
    runs = [(recipe, Ours(stage, Options(reduce_each=each))) for stage, each in ways]
    answers = ranks(train_rows, runs)
    expected = train_oracle(recipe, Rules("microbatch"))  # takes each gradient, and adds in float32
    for index, way in enumerate(ways):
        outcome = outcome_of([answer[index] for answer in answers])
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-6), way
        # After one step the momentum is the gradient; a frozen parameter has none.
        sums = {n: t["momentum_buffer"] for n, t in expected.state.items() if len(t) > 1}
        for name, gradient in sums.items():
            error = (outcome.state[name]["momentum_buffer"] - gradient).norm() / gradient.norm()
            assert error < 1e-6, (way, name, float(error))


def test_every_pair_of_values_meets():
    rows = [row for cell in PAIRS.values() for row in cell]
    for first, second in combinations(AXES, 2):
        pairs = product(AXES[first], AXES[second])
        expected = {(a, b) for a, b in pairs if legal({first: a, second: b})}
        assert expected <= {(row[first], row[second]) for row in rows}, (first, second)
