"""Muon on matrices of blocks, AdamW on the rest: equal to one process, whether ranks hold whole matrices or pieces.

The oracle of test_parity.py steps the same optimizer on whole weights; here it is shown to be torch's two optimizers.
Gradients are summed in rank order on both sides, so that equality is bit for bit: what differs by a rounding before the
orthogonalization, which runs in bfloat16, would differ in the third digit after it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import _muon

from tests.composing import composed
from tests.crossed import crossed, every_nth
from tests.models_for_tests import MODELS
from tests.oracle import (
    Outcome,
    Recipe,
    Rules,
    _train_oracle,
    assert_same,
    build_on_rank,
    configured,
    outcome_of,
    pieces_of,
    run_steps,
    train_on_ranks,
    train_oracle,
    train_third_step,
    train_two_steps,
)
from tests.plan.real_steps import assert_as_planned
from tests.strategies.engine import Ours
from tests.strategies.pairwise import Row, pairwise
from zeroexp.comm.collectives import TRANSPORTS
from zeroexp.config.keys import OptimizerConfig
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.cut.matrix_step import orthogonalizing_cost
from zeroexp.cut.stage import STAGES
from zeroexp.interface.canonical import merge
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.plan.sent_bytes import EngineForm
from zeroexp.process.world import World
from zeroexp.training.muon import make_muon
from zeroexp.zero.options import Options

RECIPE = Recipe(optimizer="muon", max_grad_norm=1e6)
NUM_MATRICES = 6  # two in each of three blocks
AXES: dict[str, Any] = {
    "stage": list(STAGES),
    "layout": ["parameter", "tensor", "buffer"],
    "world_size": [1, 2, 3, 4],
    "matrix_step": ["alltoall", "gather"],
    "transport": ["direct", "gloo"],
    "unit": ["block", "module", "model", "layer"],
    "owners": ["greedy", "contiguous"],
    "replicas": [1, 2],
    "optimizer_over": ["group", "all"],
    "precision": ["fp32", "bf16_master"],
    "moments": [None, "bfloat16"],
    "model": ["toy", "reused", "llama", "moe_by_turns"],
}


def legal(row: Row) -> bool:
    """Replicas are of an optimizer that rests sharded, over all of them if it is to."""
    in_groups = row.get("stage") not in ("ddp", "zero1_allreduce") and row.get("world_size") in (
        4,
        None,
    )
    over_all = row.get("optimizer_over") == "all"
    return (row.get("replicas") != 2 and not over_all) or (
        in_groups and not (over_all and row.get("replicas") == 1)
    )


ROWS = pairwise(AXES, every=("stage", "layout"), legal=legal)
ALL = pairwise(AXES, every=("stage", "layout", "world_size"), legal=legal)


def test_it_is_two_optimizers_of_torch() -> None:
    ours, theirs = MODELS["toy"].build(), MODELS["toy"].build()
    config = OptimizerConfig(name="muon", lr=0.02, momentum=0.9, fused=False)
    one = optimizer_factory(config)(parameter_groups(ours.module, config, ours.blocks))
    named = {n: p for n, p in theirs.module.named_parameters() if p.requires_grad}
    matrices = [p for n, p in named.items() if n.startswith("blocks") and p.ndim == 2]
    decayed = [p for n, p in named.items() if p.ndim == 2 and not n.startswith("blocks")]
    plain = [p for p in named.values() if p.ndim < 2]
    assert len(matrices) == NUM_MATRICES
    two = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
            lr=0.02,
            betas=(0.9, 0.95),
            weight_decay=0.1,
        ),
    ]
    for step in range(3):
        for parameter, other in zip(
            ours.module.parameters(), theirs.module.parameters(), strict=True
        ):
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(step)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                other.grad = parameter.grad.clone()
        one.step()
        for each in two:
            each.step()
    for parameter, other in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
        assert torch.equal(parameter, other)


def train_rows(
    world: World, runs: list[tuple[Recipe, Any]]
) -> list[tuple[tuple[Outcome, CanonicalState], int]]:
    """What each run came to, and how many matrices this rank orthogonalized in its steps."""
    return [train_counted(world, *run) for run in runs]


def train_counted(world: World, recipe: Recipe, make: Any) -> Any:
    strategy = build_on_rank(world, recipe, make)
    outcome, count = counted(lambda: run_steps(strategy, world, recipe, range(recipe.steps)))
    return (outcome, pieces_of(strategy)), count


def counted(call: Any) -> Any:
    """Count what torch's kernel gets, not what the engine says."""
    kernel, count = _muon._zeropower_via_newtonschulz, 0

    def counting(*arguments: Any, **words: Any) -> Any:
        nonlocal count
        count += 1
        return kernel(*arguments, **words)

    _muon._zeropower_via_newtonschulz = counting
    try:
        return call(), count
    finally:
        _muon._zeropower_via_newtonschulz = kernel


def recipe_of(row: Row) -> Recipe:
    words = ("world_size", "precision", "model", "moments")
    return replace(RECIPE, steps=2, **{word: row[word] for word in words})


def make_of(row: Row) -> Ours:
    words = ("layout", "unit", "transport", "owners", "replicas", "matrix_step")
    words = (*words, "optimizer_over") if "optimizer_over" in row else words
    return Ours(row["stage"], Options(**{word: row[word] for word in words}))


@cache
def oracle_of(recipe: Recipe, replicas: int) -> tuple[Outcome, int]:
    """What one process comes to, and how many matrices it orthogonalizes."""
    rules = Rules(replicas=replicas)
    return counted(lambda: _train_oracle.__wrapped__(recipe, rules, MODELS[recipe.model]))


@crossed(
    "world_size, table",
    AXES["world_size"],
    [ROWS, ALL],
    quick=lambda world_size, table: table is ROWS and world_size == 2,
)
def test_it_equals_one_process_and_steps_each_matrix_once(ranks, world_size, table) -> None:
    """Of `gather` each rank that holds a piece steps it, as the pieces of the saved momentum tell."""
    rows = [row for row in table if row["world_size"] == world_size]
    runs = [(recipe_of(row), make_of(row)) for row in rows]
    answers = ranks(train_rows, runs, world_size=world_size)
    for index, (row, (recipe, _)) in enumerate(zip(rows, runs, strict=True)):
        states = [answer[index][0] for answer in answers]
        expected, num_steps = oracle_of(recipe, row["replicas"])
        try:
            assert_same(outcome_of(states), expected)
        except AssertionError as error:
            raise AssertionError(f"{row}: {error}") from error
        times = sum(answer[index][1] for answer in answers)
        num_optimizers = 1 if row["optimizer_over"] == "all" else row["replicas"]
        if row["stage"] == "ddp":
            assert times == num_steps * world_size, row
        elif row["matrix_step"] == "alltoall" or row["layout"] == "parameter":
            assert times == num_steps * num_optimizers, row
        elif not MODELS[row["model"]].skips and num_optimizers == 1:
            pieces = [m for _, state in states for m in momenta(state)]
            assert times == recipe.steps * sum(len(m.pieces) for m in pieces), row


def momenta(state: CanonicalState) -> list[CanonicalTensor]:
    return [entry["momentum_buffer"] for entry in state.values() if "momentum_buffer" in entry]


@pytest.mark.parametrize("engine", [("ddp", "torch"), ("zero1", "torch"), ("ddp", "buffer")])
def test_engines_that_keep_matrices_whole(ranks, engine) -> None:
    answers = ranks(train_on_ranks, RECIPE, configured(*engine))
    # DistributedDataParallel multiplies by the world size and divides again: exact at two ranks.
    assert_same(outcome_of(answers), train_oracle(RECIPE))


def make(stage: str, implementation: str, matrix_step: str | None = None) -> Any:
    ours = {"reduce_each": "step", "matrix_step": matrix_step} if implementation != "torch" else {}
    return configured(stage, implementation, **ours)


@every_nth(
    2,
    "first, last",
    [
        (("zero3", "parameter"), ("ddp", "torch")),
        (("ddp", "buffer"), ("zero2", "parameter")),
        (("zero1", "torch"), ("zero1", "parameter")),
        (("zero3", "parameter"), ("zero2", "buffer")),
        (("zero1", "tensor"), ("zero3", "parameter")),
        (("zero2", "buffer", "gather"), ("zero3", "tensor")),
        (("zero3", "tensor"), ("zero1", "buffer", "gather")),
    ],
)
def test_an_engine_goes_on_from_the_state_of_another(ranks, first, last) -> None:
    state = merge(ranks(train_two_steps, RECIPE, make(*first)))
    outcome = outcome_of(ranks(train_third_step, RECIPE, make(*last), state))
    expected = train_oracle(RECIPE)
    assert_same(outcome, replace(expected, losses=expected.losses[2:], norms=expected.norms[2:]))


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero2", "zero3"])
def test_a_plan_counts_one_moment_of_a_matrix_and_two_of_the_rest(stage) -> None:
    words = ("model=tiny", f"strategy={stage}", "strategy.implementation=parameter", "world_size=4")
    config = composed(*words, "optimizer=muon")
    model = build_on_meta(config)
    form = form_of(config, model, "direct")
    inside = [p for n, p in model.module.named_parameters() if p.ndim == 2 and _in_block(n, model)]
    trainable = [p for p in model.module.parameters() if p.requires_grad]
    matrices, numel = sum(p.numel() for p in inside), sum(p.numel() for p in trainable)
    moments = 4 * (2 * (numel - matrices) + matrices) + 4 * (len(trainable) - len(inside))
    held = [form.held_bytes("after_step", rank)["optimizer"] for rank in range(4)]
    assert (held[0] if stage == "ddp" else sum(held)) == moments
    adamw = form_of(composed(*words), model, "direct")
    assert [form.traffic(rank) for rank in range(4)] == [adamw.traffic(rank) for rank in range(4)]


def _in_block(name: str, model: Any) -> bool:
    return any(name.startswith(f"{block}.") for block in model.blocks)


CUTS = [
    *(("ddp", "parameter", None), ("zero1", "parameter", None), ("zero3", "parameter", None)),
    *(("zero1", "tensor", "gather"), ("zero1", "buffer", "alltoall")),
    *(("zero3", "tensor", "alltoall"), ("zero3", "buffer", "gather")),
]


@pytest.mark.parametrize(("index", "cut"), list(enumerate(CUTS)))
def test_a_plan_is_what_the_engine_holds_and_sends(index, cut) -> None:
    (stage, implementation, matrix_step), transport = cut, ("native", "gloo")[index % 3 == 0]
    words = (f"strategy={stage}", f"strategy.implementation={implementation}", "world_size=3")
    more = (
        "optimizer=muon",
        "data.global_batch_size=3",
        f"strategy.matrix_step={matrix_step or 'null'}",
    )
    config = composed("model=tiny", *words, *more)
    with patch.dict(TRANSPORTS, dict.fromkeys(("auto", "messages"), TRANSPORTS[transport])):
        assert_as_planned(config, transport)


@pytest.mark.parametrize(("matrix_step", "times"), [("gather", 3), ("alltoall", 2)])
def test_what_travels_of_matrices_is_bfloat16(matrix_step, times) -> None:
    """Of four pieces, all to the three others of each, or three to the whole and three back."""
    words = ("strategy=zero2", "strategy.implementation=tensor", "world_size=4")
    config = composed("model=tiny", *words, "optimizer=muon", f"strategy.matrix_step={matrix_step}")
    model = build_on_meta(config)
    sent = [form_of(config, model, "native").traffic(rank) for rank in range(4)]
    matrices = [
        p for n, p in model.module.named_parameters() if p.ndim == 2 and _in_block(n, model)
    ]
    numel = sum(p.numel() for p in matrices)
    pieces = 4 if matrix_step == "gather" else 3
    assert sum(s.bytes_by_kind["matrices"] for s in sent) == 2 * numel * pieces * times // 4
    num_blocks = len(model.blocks)
    calls = num_blocks if matrix_step == "gather" else 2
    assert {s.calls_by_kind["matrices"] for s in sent} == {calls}


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_kernel_that_orthogonalizes_overwrites_no_momentum(nesterov) -> None:
    """That of bfloat16 masters without nesterov is what it is given, which torch.optim.Muon 2.13 does overwrite."""
    weight, momentum = nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16)), torch.zeros(4, 6)
    config = OptimizerConfig(name="muon", momentum=0.9, settings={"nesterov": nesterov})
    optimizer = make_muon([{"params": [weight]}], config)
    for step in range(2):
        weight.grad = torch.randn(4, 6, generator=torch.manual_seed(step)).bfloat16()
        momentum = momentum.bfloat16().lerp_(weight.grad, 1 - 0.9)
        optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], momentum)


def test_matrices_are_balanced_by_the_cost_of_orthogonalizing_them() -> None:
    """Of four ranks that hold a quarter of each, none has more than a matrix above another."""
    config = composed(
        "model=llama_7b",
        "strategy=zero2",
        "strategy.implementation=tensor",
        "world_size=4",
        "optimizer=muon",
        "data.global_batch_size=4",
    )
    form = form_of(config, build_on_meta(config), "native")
    assert isinstance(form, EngineForm)
    (batch,) = form.matrices
    costs = [
        sum(orthogonalizing_cost(m.shape) for m in batch if m.whole_on == (rank,))
        for rank in range(4)
    ]
    dearest = max(orthogonalizing_cost(m.shape) for m in batch)
    assert len(batch) == 7 * 32 and max(costs) - min(costs) <= dearest
    assert max(costs) < 1.01 * sum(costs) / 4
