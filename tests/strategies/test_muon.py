"""Muon on matrices of blocks, AdamW on the rest: equal to one process wherever ranks own whole matrices.

The oracle of test_parity.py steps the same optimizer on whole weights; here it is shown to be torch's two optimizers.
Gradients are summed in rank order on both sides, so that equality is bit for bit: what differs by a rounding before the
orthogonalization, which runs in bfloat16, would differ in the third digit after it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import _muon

from tests.composing import composed
from tests.models_for_tests import MODELS
from tests.oracle import (
    Outcome,
    Recipe,
    assert_same,
    build_on_rank,
    configured,
    outcome_of,
    pieces_of,
    run_steps,
    train_on_ranks,
    train_oracle,
)
from tests.strategies.engine import Ours
from tests.strategies.pairwise import Row, pairwise
from zeroexp.check import check
from zeroexp.check.try_strategy import check_strategy
from zeroexp.config.keys import ConfigError, OptimizerConfig
from zeroexp.config.optimizer import optimizer_factory, parameter_groups
from zeroexp.cut.stage import STAGES
from zeroexp.engines.build import build_strategy
from zeroexp.interface.canonical import merge
from zeroexp.interface.strategy import CanonicalState
from zeroexp.measure.memory import bytes_by_kind
from zeroexp.models.module import build_model
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Options

RECIPE = Recipe(optimizer="muon", max_grad_norm=1e6)
NUM_MATRICES = 6  # two in each of three blocks
AXES: dict[str, Any] = {
    "stage": list(STAGES),
    "world_size": [1, 2, 3, 4],
    "transport": ["direct", "gloo"],
    "unit": ["block", "module", "model"],
    "owners": ["greedy", "contiguous"],
    "precision": ["fp32", "bf16_master"],
    "model": ["toy", "reused", "llama"],
}
ROWS = pairwise(AXES, every=("stage", "world_size"), legal=lambda row: True)


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
    words = {key: row[key] for key in ("world_size", "precision", "model")}
    return replace(RECIPE, **words)


@pytest.mark.parametrize("world_size", AXES["world_size"])
def test_it_equals_one_process_and_steps_each_matrix_once(ranks, world_size) -> None:
    rows = [row for row in ROWS if row["world_size"] == world_size]
    ours = [
        Ours(
            row["stage"],
            Options("parameter", row["owners"], row["unit"], transport=row["transport"]),
        )
        for row in rows
    ]
    runs = [(recipe_of(row), make) for row, make in zip(rows, ours, strict=True)]
    answers = ranks(train_rows, runs, world_size=world_size)
    for index, row in enumerate(rows):
        outcome = outcome_of([answer[index][0] for answer in answers])
        assert_same(outcome, train_oracle(recipe_of(row)))
        shards = row["stage"] != "ddp"
        matrices = [t for t in outcome.state.values() if "momentum_buffer" in t]
        times = len(matrices) * RECIPE.steps * (1 if shards else world_size)
        assert sum(answer[index][1] for answer in answers) == times, row


@pytest.mark.parametrize("engine", [("ddp", "torch"), ("zero1", "torch"), ("ddp", "buffer")])
def test_engines_that_keep_matrices_whole(ranks, engine) -> None:
    answers = ranks(train_on_ranks, RECIPE, configured(*engine))
    # DistributedDataParallel multiplies by the world size and divides again: exact at two ranks.
    assert_same(outcome_of(answers), train_oracle(RECIPE))


def make(stage: str, implementation: str) -> Any:
    ours = {"reduce_each": "step"} if implementation != "torch" else {}
    return configured(stage, implementation, **ours)


def first_steps(world: World, stage: str, implementation: str) -> CanonicalState:
    strategy = build_on_rank(world, RECIPE, make(stage, implementation))
    run_steps(strategy, world, RECIPE, range(2))
    return pieces_of(strategy)


def last_step(world: World, stage: str, implementation: str, state: CanonicalState) -> Any:
    strategy = build_on_rank(world, RECIPE, make(stage, implementation))
    strategy.load_state_dict(state)
    return run_steps(strategy, world, RECIPE, range(2, 3)), pieces_of(strategy)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (("zero1", "parameter"), ("zero3", "parameter")),
        (("zero3", "parameter"), ("ddp", "torch")),
        (("ddp", "buffer"), ("zero2", "parameter")),
        (("zero1", "torch"), ("zero1", "parameter")),
    ],
)
def test_an_engine_goes_on_from_the_state_of_another(ranks, first, last) -> None:
    state = merge(ranks(first_steps, *first))
    outcome = outcome_of(ranks(last_step, *last, state))
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


@pytest.mark.parametrize(
    ("stage", "implementation"),
    [("ddp", "parameter"), ("zero1", "parameter"), ("zero3", "parameter")],
)
def test_a_plan_is_what_the_engine_holds(stage, implementation) -> None:
    words = (f"strategy={stage}", f"strategy.implementation={implementation}", "world_size=3")
    config = composed("model=tiny", *words, "optimizer=muon", "data.global_batch_size=3")
    form = form_of(config, build_on_meta(config), "native")
    for rank in range(3):
        with fake_world(rank, 3) as world:
            strategy = build_strategy(config, build_model(config.model, seed=1), world)
            with strategy.microbatch(last=True):
                tokens = torch.zeros(1, 4, dtype=torch.long)
                strategy.backward(strategy.model(input_ids=tokens).logits.float().sum())
            strategy.step(drain=True)
            assert bytes_by_kind(strategy.model_states()) == form.held_bytes("after_step", rank)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("strategy=zero1 strategy.implementation=buffer", "use parameter"),
        ("strategy=zero3 strategy.implementation=torch", "use parameter"),
        ("strategy.implementation=parameter optimizer.settings.ns_steps=0", "use 1 to 99"),
        ("strategy.implementation=parameter optimizer.settings.adjust_lr=no", "match_rms_adamw"),
        ("strategy.implementation=parameter optimizer.settings.nesterov=maybe", "true or false"),
        ("strategy.implementation=parameter optimizer.momentum=0", "between 0 and 1"),
        ("strategy.implementation=parameter optimizer.momentum=1", "between 0 and 1"),
    ],
)
def test_what_it_can_not_do_is_refused_in_a_line(words, line) -> None:
    with pytest.raises(ConfigError, match=line):
        config = composed("optimizer=muon", "world_size=2", *words.split())
        check(config)
        check_strategy(config)


def test_a_model_without_a_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match="no block of the model has a trainable matrix"):
        parameter_groups(nn.LayerNorm(3), OptimizerConfig(name="muon"), [])
