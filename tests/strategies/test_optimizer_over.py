"""The optimizer over all ranks, of all parameters or of one kind, and parameters and gradients inside of groups.

It is compared with one process, on four ranks in test_replicas.py, and in the bytes of arithmetic.

The oracle is that of replicas: each group adds up its ranks, then these sums are added. What a rank updates is a share
of its piece, so that every cut of a piece is tried: none, through a parameter, at its border, and shares of padding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.comm.test_issued import WIDTH, engine_of_nine_units
from tests.oracle import Recipe, build_on_rank, run_steps
from tests.plan.real_steps import one_step
from tests.strategies.engine import Ours
from tests.strategies.pairwise import Row, pairwise
from tests.strategies.test_parity import AXES, legal
from tests.strategies.test_replicas import STAGES_IN_GROUPS, check, issued_in_a_step
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Options

MESH: dict[str, Any] = {
    **AXES,
    "stage": STAGES_IN_GROUPS,
    "offload": [None, "optimizer"],
    "optimizer_over": ["all"],
}
VARIED = ("stage", "layout", "transport", "unit", "precision", "bucket_mb")  # before every change


def rows_of(ranks: int, groups: int, *every: str, varied: Sequence[str] = tuple(MESH)) -> list[Row]:
    """A ring of three or more adds in an order of its own, as `legal` knows of a world of three."""
    axes = {name: each if name in varied else each[:1] for name, each in MESH.items()}
    axes |= {"world_size": [ranks], "replicas": [groups]}
    return pairwise(
        axes, every=("stage", "layout", *every), legal=lambda row: legal({**row, "world_size": 3})
    )


slow = pytest.mark.slow


# Of the same shares of pieces on four ranks each stage has some rows in test_replicas.py.
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES_IN_GROUPS)
def test_six_ranks_equal_one_process(ranks, stage):
    """In two groups, or in three; every layout, transport and others by pairs."""
    rows = rows_of(6, 2 if stage == "zero2" else 3, varied=VARIED)
    check(ranks, [row for row in rows if row["stage"] == stage])


@pytest.mark.parametrize("stage", STAGES_IN_GROUPS)
@pytest.mark.parametrize(
    "shape",
    [
        *(pytest.param(shape, marks=pytest.mark.wide) for shape in ((6, 2), (6, 3), (8, 2))),
        pytest.param((8, 4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_more_ranks_equal_one_process(ranks, shape, stage):
    check(ranks, [row for row in rows_of(*shape, "transport") if row["stage"] == stage])


def test_the_link_between_groups_carries_the_bytes_of_its_all_reduce():
    """8 ranks in 4 groups: the all-reduce of P/2 becomes its halves, 2 P/2 3/4 in all; inside nothing changes."""
    group, num_bytes = issued_in_a_step("zero1", 8, replicas=4)
    over_all, _ = issued_in_a_step("zero1", 8, replicas=4, optimizer_over="all")
    assert group.pop(("allreduce_", 4)) == num_bytes // 2
    halves = {("_reduce_scatter_base_", 4): num_bytes // 2, ("_allgather_base_", 4): num_bytes // 2}
    assert over_all == {**group, **halves}


def test_messages_between_groups_go_to_the_holders_of_the_same_pieces():
    """To each holder what it updates of this rank's sums, P/8, and after the step what this rank has updated, P/8."""
    options: dict[str, Any] = {"transport": "gloo", "replicas": 4, "optimizer_over": "all"}
    given, num_bytes = issued_in_a_step("zero2", 8, 5, **options)
    sent = {to: size for (name, to), size in given.items() if name == "send"}
    assert set(sent) == {4, 1, 3, 7}
    for holder in (1, 3, 7):
        assert sent[holder] == pytest.approx(2 * num_bytes / 8, rel=0.02)


@pytest.mark.parametrize(("stage", "parameters"), [("zero2", 1), ("zero3", 2)])
def test_what_rests_where(stage, parameters):
    """8 ranks in 4 groups of 2: parameters P or P/2 and gradients P/2, as in a group; two moments of P/8, over all."""
    held: dict[str, dict[str, int]] = {}
    with fake_world(5, 8) as world:
        words: dict[str, Any] = {"replicas": 4, "optimizer_over": "all"}
        strategy = engine_of_nine_units(stage, "buffer", world, **words)
        one_step(strategy, torch.ones(2, WIDTH), 1, held, drain=True)
        num_bytes = 4 * sum(h.chunk.unpadded_numel for unit in strategy.units for h in unit.held)
    assert held["at_rest"]["parameters"] == num_bytes // parameters
    assert held["after_backward"]["gradients"] == num_bytes // 2
    assert held["after_step"]["optimizer"] == pytest.approx(2 * num_bytes / 8, rel=0.02)


# Each row's ranks, beside those of all others: of rows that one kernel steps, and of matrices that are stepped whole.
OF_ROWS = {
    json.dumps(kinds): over
    for over, kinds in [
        ("group", {"embeddings": {"over": "all"}, "vectors": {"over": "all", "layout": "tensor"}}),
        ("all", {"vectors": {"over": "group"}, "*.down.weight": {"over": "group", "lr": 0.01}}),
        ("group", {"matrices": {"name": "muon", "momentum": 0.9, "over": "all"}}),
        ("all", {"matrices": {"name": "muon", "momentum": 0.9, "over": "group"}}),
    ]
}
VARIED_BY_KINDS = ("stage", "layout", "transport", "unit", "bucket_mb", "owners", "accumulation")


def rows_of_kinds(ranks: int, groups: int) -> list[Row]:
    """Muon shows the order in which a ring of three adds in its third digit."""
    varied = {name: each if name in VARIED_BY_KINDS else each[:1] for name, each in AXES.items()}
    shape = {"world_size": [ranks], "replicas": [groups], "stage": STAGES_IN_GROUPS}
    more = {"kinds": list(OF_ROWS), "matrix_step": ["alltoall", "gather"], "max_grad_norm": [1e6]}
    in_a_ring = ranks // groups > 2
    rows = pairwise(
        {**more, **varied, **shape, **more},
        every=("stage", "kinds"),
        legal=lambda row: (
            not (in_a_ring and row.get("transport") == "native" and "muon" in row.get("kinds", ""))
        ),
    )
    return [{**row, "optimizer_over": OF_ROWS[row["kinds"]]} for row in rows]


@pytest.mark.parametrize(
    ("stage", "size", "groups"),
    [
        *(
            pytest.param(stage, 4, 2, marks=[] if stage == "zero1" else [slow])
            for stage in STAGES_IN_GROUPS
        ),
        pytest.param("zero2", 6, 2, marks=slow),
        pytest.param("zero3", 6, 3, marks=slow),
    ],
)
def test_kinds_over_ranks_of_their_own_equal_one_process(ranks, stage, size, groups):
    """In two groups, and on six ranks, where parameters or gradients rest sharded, each kind once more."""
    rows = [row for row in rows_of_kinds(size, groups) if row["stage"] == stage]
    check(ranks, rows if size == 4 else list({row["kinds"]: row for row in rows}.values()))


def train_without_a_gather_between(world: World) -> str:
    """What the engine says where a block's updated shares do not reach the other replica."""
    recipe = Recipe(world_size=4, steps=1)
    options = Options(replicas=2, optimizer_over="all")
    strategy: Any = build_on_rank(world, recipe, Ours("zero3", options))
    next(unit for unit in strategy.units if unit.name == "blocks.1")._parts_between = []
    try:
        run_steps(strategy, world, recipe, range(1))
    except RuntimeError as error:
        return str(error)
    return "trained on"


def test_a_missing_gather_between_replicas_is_named_in_the_first_step(ranks):
    errors = ranks(train_without_a_gather_between, world_size=4)
    assert len(set(errors)) == 1
    assert "replicas differ: ranks 0 and 2" in errors[0] and "blocks.1" in errors[0], errors[0]
