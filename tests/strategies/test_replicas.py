"""Meshes of ranks: replicas, their optimizers over all ranks, copies in nodes. One process that adds by groups agrees.

Replicas are groups of ranks that hold all states each, sharded inside. What holds of the other two alone is in
test_optimizer_over.py and test_secondary.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.comm.test_issued import a_step, engine_of_nine_units
from tests.crossed import crossed
from tests.oracle import (
    Recipe,
    Rules,
    assembled,
    assert_same,
    build_on_rank,
    outcome_of,
    pieces_of,
    run_steps,
    train_oracle,
)
from tests.strategies.engine import Ours
from tests.strategies.pairwise import Row, pairwise
from tests.strategies.test_parity import (
    AXES,
    PRECISION,
    check_rows,
    legal,
    ours,
    recipe_of,
    tolerance,
)
from zeroexp.comm.base import Pending
from zeroexp.interface.canonical import merge
from zeroexp.interface.strategy import CanonicalState
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Options

STAGES_IN_GROUPS = ["zero1", "zero2", "zero3"]
MESHES: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 2},
    "over all": {"replicas": 2, "optimizer_over": "all"},
    "copies": {"replicas": 1, "secondary_partition": 2},
}
MESH = {**AXES, "stage": STAGES_IN_GROUPS, "world_size": [4], "mesh": list(MESHES)}


def legal_on_a_mesh(row: Row) -> bool:
    mesh = row.get("mesh")
    if mesh in ("over all", "copies") and row.get("offload") == "all":
        return False
    has_copies = row.get("stage", "zero3") == "zero3" and row.get("transport") != "direct"
    return legal(row) and (mesh != "copies" or has_copies)


ROWS = pairwise(MESH, every=("stage", "layout", "mesh"), legal=legal_on_a_mesh)
# Before every change: what a mesh meets. What rests, is kept or computed again inside of a rank is as without one.
VARIED = ("stage", "layout", "transport", "overlap", "offload", "optimizer", "max_grad_norm")
MET = {name: each if name in VARIED else each[:1] for name, each in MESH.items()}
MET |= {"mesh": MESH["mesh"], "accumulation": [2, 1], "reduce_each": MESH["reduce_each"]}
MET |= {"unit": ["block", "layer"], "precision": PRECISION, "bucket_mb": AXES["bucket_mb"][::2]}
QUICK = pairwise(MET, every=("stage", "mesh"), legal=legal_on_a_mesh)
# Three things at once, which pairs leave out: sums of several microbatches are summed between groups once.
QUICK += [
    {name: values[0] for name, values in MESH.items()}
    | {"stage": stage, "reduce_each": "microbatch"}
    for stage in ("zero2", "zero3")
]


def rules_of(row: Row) -> Rules:
    return Rules(row["reduce_each"], replicas=row["replicas"])


def check(ranks: Any, rows: list[Row]) -> None:
    """All of one world size; those with a `mesh` have its words."""
    rows = [{**row, **MESHES.get(row.get("mesh", ""), {})} for row in rows]
    of_mesh = ("replicas", "optimizer_over", "matrix_step", "secondary_partition")
    makes = [ours(row) for row in rows]
    makes = [
        replace(
            m, options=replace(m.options, **{name: row[name] for name in of_mesh if name in row})
        )
        for m, row in zip(makes, rows, strict=True)
    ]
    recipes = [replace(recipe_of(row), kinds=row.get("kinds", "{}")) for row in rows]

    def is_that_of_one_process(row: Row, recipe: Recipe, answers: Any) -> None:
        # A ring of two adds in any order.
        adds = 2 if (row["world_size"], row["replicas"]) == (4, 2) else 3
        bound = tolerance({**row, "world_size": adds}, recipe)
        expected = train_oracle(replace(recipe, checkpointing=False), rules_of(row))
        assert_same(outcome_of(answers), expected, rtol=bound, atol=bound)

    check_rows(ranks, rows, list(zip(recipes, makes, strict=True)), is_that_of_one_process)


@crossed(
    "stage, rows",
    STAGES_IN_GROUPS,
    [QUICK, ROWS],
    quick=lambda stage, rows: rows is QUICK and stage == "zero3",
)
def test_four_ranks_on_a_mesh_equal_one_process(ranks, stage, rows):
    """Every stage x mesh, or also x layout; transport, accumulation, clipping and other settings by pairs."""
    check(ranks, [row for row in rows if row["stage"] == stage])


def train_without_sums_between(world: World, stage: str, step: int) -> str:
    """What the engine says where gradients of a block are not summed between replicas from this step on."""
    recipe = Recipe(world_size=4, steps=step + 1)
    strategy: Any = build_on_rank(world, recipe, Ours(stage, Options(replicas=2)))
    summed = strategy.wire._sum_between

    def skip_a_block(sums: Any, what: str, shares: Any = ()) -> Pending:
        return Pending([]) if "blocks.1" in what else summed(sums, what, shares)

    run_steps(strategy, world, recipe, range(step))
    strategy.wire._sum_between = skip_a_block
    try:
        run_steps(strategy, world, recipe, range(step, step + 1))
    except RuntimeError as error:
        return str(error)
    return "trained on"


def test_a_missing_sum_between_replicas_is_named_in_the_first_steps(ranks):
    for step, stage in enumerate(("zero1", "zero3")):
        errors = ranks(train_without_sums_between, stage, step, world_size=4)
        assert len(set(errors)) == 1
        assert "replicas differ: ranks 0 and 2" in errors[0] and "blocks.1" in errors[0], errors[0]
        assert "a sum between replicas is missing" in errors[0]


class Backend(TorchDispatchMode):
    """The bytes that torch's backend is given, by collective and number of ranks; messages by rank they go to."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name, _ = str(func).split(".")
        if namespace == "c10d":
            sizes = [leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            group = next(a for a in args if isinstance(a, torch.ScriptObject | ProcessGroup))
            where = args[2] if name == "send" else ProcessGroup.unbox(group).size()
            self.bytes[name, where] += max(sizes)
        return func(*args, **(kwargs or {}))


def issued_in_a_step(
    stage: str, world_size: int, rank: int = 0, **options: Any
) -> tuple[dict[tuple[str, int], int], int]:
    """What the backend was given in a step, and the bytes of the model's parameters."""
    with fake_world(rank, world_size) as world:
        strategy = engine_of_nine_units(stage, "buffer", world, **options)
        for _ in range(2):
            a_step(strategy)
        with Backend() as backend:
            a_step(strategy)
        parameters = sum(unit.held[0].chunk.unpadded_numel for unit in strategy.units)
        return dict(backend.bytes), 4 * parameters


def test_the_published_example_of_eight_ranks_in_four_groups_of_two():
    """K redundant optimizers: between the groups 2P become 6P/8; ring bytes by group, 2P (1 - 1/N) in all."""
    ddp, num_bytes = issued_in_a_step("ddp", 8)
    norm = ddp["allreduce_", 8] - num_bytes
    assert 0 < norm < 0.02 * num_bytes  # the tally before the step
    assert issued_in_a_step("zero1", 8, replicas=4)[0] == {
        ("_reduce_scatter_base_", 2): num_bytes,
        ("allreduce_", 4): num_bytes // 2,
        ("allreduce_", 8): norm,
        ("_allgather_base_", 2): num_bytes,
    }
    inside, slow = 2 * num_bytes * 1 / 2, 2 * num_bytes / 2 * 3 / 4
    assert slow == 6 / 8 * num_bytes and inside + slow == 2 * num_bytes * 7 / 8


def test_messages_go_to_the_ranks_of_the_group_and_to_the_holders_of_the_same_pieces():
    """Between groups a rank sends what it owns, to each of the others that hold it, once for the sum and once after."""
    for rank in (0, 5):
        given, num_bytes = issued_in_a_step("zero2", 8, rank, transport="gloo", replicas=4)
        sent = {to: size for (name, to), size in given.items() if name == "send"}
        neighbour, holders = rank ^ 1, {r for r in range(8) if r % 2 == rank % 2} - {rank}
        assert set(sent) == {neighbour, *holders}
        assert sent[neighbour] == pytest.approx(
            num_bytes, rel=0.02
        )  # half of the gradients, half of the weights
        assert sum(sent[r] for r in holders) == pytest.approx(6 / 8 * num_bytes, rel=0.02)


def train_on(
    world: World, recipe: Recipe, make: Ours, saved: CanonicalState | None
) -> tuple[CanonicalState, CanonicalState]:
    """This rank's pieces right after it loaded what was saved, if anything, and after a step from there."""
    strategy = build_on_rank(world, recipe, make)
    if saved is not None:
        strategy.load_state_dict(saved)
    loaded = pieces_of(strategy)
    run_steps(strategy, world, replace(recipe, world_size=world.size), range(1))
    return loaded, pieces_of(strategy)


@pytest.mark.slow
def test_a_state_goes_from_replicas_to_any_ranks_and_back(ranks):
    """Each element is given once, by one of the replicas that hold it; the state is the same bits everywhere."""
    recipe, saved = Recipe(precision="bf16_master"), None
    on_ranks = [
        (4, Ours("zero3", Options(replicas=2))),
        (2, Ours("zero3", Options())),
        (4, Ours("zero1", Options(layout="parameter", replicas=2, transport="native"))),
        (6, Ours("zero3", Options(replicas=2, optimizer_over="all"))),
        (4, Ours("zero2", Options(layout="parameter", replicas=2, optimizer_over="all"))),
        (1, Ours("zero1", Options())),
    ]
    for world_size, make in on_ranks:
        answers = ranks(train_on, recipe, make, saved, world_size=world_size)
        loaded, stepped = zip(*answers, strict=True)
        if saved is not None:
            same_state(assembled(loaded), assembled([saved]))
        assembled(stepped)
        saved = merge(stepped)


def same_state(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].keys() == other[name].keys()
        assert all(torch.equal(one[name][key], other[name][key]) for key in one[name]), name
