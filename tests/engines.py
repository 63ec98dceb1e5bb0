"""Every engine under test, how it adds up a step, and how near it must come to the oracle.

Equality is bit for bit where the engine sums in rank order and never multiplies by what is not a power of two (see
tests/oracle.py). Otherwise the tolerance is what a few roundings become in three steps of AdamW, whose update does not
depend on the size of a gradient: an element with a nearly zero gradient moves by rounding alone, so the bound is
absolute, in parts of the learning rate (0.02).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest

from tests.oracle import (
    Make,
    Recipe,
    Rules,
    assert_same,
    configured,
    outcome_of,
    train_on_ranks,
    train_oracle,
)
from tests.ranks import Ranks

FLOAT32_ROUNDING = 2e-5  # of 0.06, the way an element can go in three steps
BFLOAT16_ROUNDING = 2e-2


@dataclass(frozen=True)
class Engine:
    make: Make
    rules: Rules
    exact_up_to: int  # world size until which it equals the oracle bit for bit
    precisions: tuple[str, ...]

    def atol(self, recipe: Recipe) -> float:
        exact = recipe.world_size <= self.exact_up_to and not recipe.fused
        if exact and recipe.max_grad_norm is None:
            return 0.0
        return FLOAT32_ROUNDING if recipe.precision == "fp32" else BFLOAT16_ROUNDING


SKIP_PER_STEP = Rules(reduce_each="step")
SKIP_PER_MICROBATCH = Rules(reduce_each="microbatch", added_in_master=True)
DDP_PRECISIONS = ("fp32", "bf16", "autocast")
FSDP_PRECISIONS = ("fp32", "bf16_master", "paper16")

NATIVE: dict[str, Engine] = {
    "ddp": Engine(configured("ddp", "torch"), SKIP_PER_STEP, 2, DDP_PRECISIONS),
    "ddp_no_view": Engine(
        configured("ddp", "torch", gradient_as_bucket_view=False), SKIP_PER_STEP, 2, DDP_PRECISIONS
    ),
    "ddp_zero_redundancy": Engine(configured("zero1", "torch"), SKIP_PER_STEP, 2, DDP_PRECISIONS),
    "fsdp2_no_reshard": Engine(
        configured("zero2", "torch"), SKIP_PER_MICROBATCH, 2, FSDP_PRECISIONS
    ),
    "fsdp2": Engine(configured("zero3", "torch"), SKIP_PER_MICROBATCH, 2, FSDP_PRECISIONS),
}
# Two groups of two ranks; what a group has reduced is summed between groups in every microbatch.
HSDP = {
    stage: Engine(
        configured(stage, "torch", replicas=2),
        replace(SKIP_PER_MICROBATCH, replicas=2, groups_each="microbatch"),
        4,
        FSDP_PRECISIONS,
    )
    for stage in ("zero2", "zero3")
}

ALL_DTYPES = ("fp32", "bf16", "bf16_master", "paper16")
# Every stage and every layout once or more; the whole matrix is in test_parity.py.
OURS: dict[str, Engine] = {
    f"{stage}_{layout}": Engine(configured(stage, layout), rules, 3, ALL_DTYPES)
    for stage, layout, rules in (
        ("ddp", "tensor", Rules("step")),
        ("zero1_allreduce", "parameter", Rules("step")),
        ("zero1", "buffer", Rules("step")),
        ("zero2", "parameter", Rules("microbatch")),
        ("zero3", "tensor", Rules("microbatch")),
        ("zero3", "buffer", Rules("microbatch")),
    )
}
ENGINES = {**NATIVE, **OURS}

# A flat tensor steps all of its elements, whether or not they have a gradient. zero3 computes linear layers by a
# function of its own, which rounds in bfloat16 before it adds the bias.
DEEPSPEED: dict[str, Engine] = {
    f"deepspeed_{stage}": Engine(
        configured(stage, "deepspeed"),
        Rules(reduce_each, missing="zeros", added_in_master=True),
        2,
        precisions,
    )
    for stage, reduce_each, precisions in (
        ("zero1", "step", ("fp32", "bf16_master")),
        ("zero2", "microbatch", ("fp32", "bf16_master")),
        ("zero3", "microbatch", ("fp32",)),
    )
}
EVERY_ENGINE = {**ENGINES, **DEEPSPEED}
NEEDS_DEEPSPEED = (
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: see docs/deepspeed.md, or make test-deepspeed",
    ),
)


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return NEEDS_DEEPSPEED if name in DEEPSPEED else ()


def check(ranks: Ranks, engine: Engine, recipe: Recipe) -> None:
    answers = ranks(train_on_ranks, recipe, engine.make, world_size=recipe.world_size)
    oracle = train_oracle(recipe, engine.rules)
    atol = engine.atol(recipe)
    assert_same(outcome_of(answers), oracle, rtol=atol, atol=atol)
