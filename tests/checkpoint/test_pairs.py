"""What one engine saves, in another's hands: one table of pairs of engine, world size, precision, model and optimizer.

A source trains three steps and saves behind each. A target loads one of its checkpoints: the state is what was saved,
bit for bit, or rounded once where the target's precision is narrower. One that is as its source was goes on as if
nothing had happened: loss, norm, weights, moments and dropout, bit for bit.

The usual model has all that can go wrong: tied weights, odd sizes, dimensions smaller than the world, frozen
parameters, and one that nobody uses, of which some engines have moments and others none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.saving import checkpoint, resume_each, train_and_save
from tests.crossed import every_nth
from tests.engines import DEEPSPEED, ENGINES, EVERY_ENGINE, FLOAT32_ROUNDING, NEEDS_DEEPSPEED
from tests.oracle import PRECISIONS, Outcome, Recipe, assembled, assert_same, outcome_of

State = dict[str, dict[str, Tensor]]
# One engine of each family of layouts, ours and torch's.
FAMILIES = (
    "zero2_parameter",
    "zero3_tensor",
    "zero3_buffer",
    "ddp",
    "ddp_zero_redundancy",
    "fsdp2",
)
FROZEN = "shift"  # rests in the dtype that computes, and is saved in it
# torch's DDP cuts its buckets anew behind the first step of a process: three ranks then add in another order.
ADDS_ANEW = ("ddp", "ddp_no_view", "ddp_zero_redundancy")


@dataclass(frozen=True)
class Side:
    engine: str
    world_size: int = 2
    precision: str = "fp32"
    model: str = "toy"
    optimizer: str = "adamw"

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            model=self.model,
            world_size=self.world_size,
            precision=self.precision,
            optimizer=self.optimizer,
            fused=self.optimizer == "adamw",  # torch has no fused SGD for the shards of FSDP2
            max_grad_norm=0.5,
        )

    def __str__(self) -> str:
        return "-".join(
            map(str, (self.engine, self.world_size, self.precision, self.model, self.optimizer))
        )


Row = tuple[Side, int]  # who saved, and behind which step


def table() -> dict[Side, list[Row]]:
    """Target -> the checkpoints that it loads."""
    rows: dict[Side, list[Row]] = {}
    for number, name in enumerate(ENGINES):
        # Every engine loads those of half of the families, from a larger world or from a smaller one.
        size = 1 + number % 3
        others = [3 if size < 3 else 1 + n % 2 for n in range(len(FAMILIES))]
        sources = list(zip(FAMILIES, others, strict=True))[number % 2 :: 2]
        rows[Side(name, size)] = [(Side(*each), 2) for each in sources]
    # One rank has no peer, and torch's DDP is exact on two.
    for name, size in [("zero3_buffer", 1), ("ddp", 2), *((name, 3) for name in FAMILIES)]:
        again = Side(name, size)
        for step in (1, 2) if name in ("zero3_buffer", "ddp") else (1,):
            rows.setdefault(again, []).append((again, step))
    for again in (
        *(Side("zero3_buffer", precision="bf16"), Side("zero1_buffer", precision="bf16_master")),
        *(Side("ddp", precision="bf16"), Side("ddp_zero_redundancy", precision="autocast")),
        Side("fsdp2", precision="bf16_master"),
        # Every rank has random states of its own.
        *(Side(name, model="dropout") for name in ("zero3_buffer", "fsdp2")),
        Side("zero3_tensor", model="moe_by_turns"),
        *(
            Side(name, optimizer="sgd")
            for name in ("zero2_parameter", "fsdp2", "ddp_zero_redundancy")
        ),
    ):
        rows[again] = [(again, 1)]
    # The master is the weight, and bf16 goes into a master exactly. What is rounded is rounded to nearest even, once:
    # moments too, since torch's fused AdamW takes those of the weight's dtype alone.
    for source, precision, targets in (
        (
            Side("zero1_buffer", precision="bf16_master"),
            "fp32",
            ("zero3_buffer", "ddp_zero_redundancy", "fsdp2"),
        ),
        (
            Side("fsdp2", precision="bf16_master"),
            "bf16",
            ("zero3_buffer", "zero2_parameter", "ddp_zero_redundancy"),
        ),
        (Side("zero3_tensor", precision="bf16_master"), "bf16", ("ddp",)),
        (Side("ddp", precision="bf16"), "bf16_master", ("zero3_buffer", "fsdp2")),
    ):
        for name in targets:
            rows.setdefault(Side(name, 3, precision), []).append((source, 2))
    return rows


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Callable[[Side], tuple[Path, Outcome, list[State]]]:
    """(folder, the whole run, the state behind each of its steps) of a source; each trains once."""

    @functools.cache
    def saved(source: Side) -> tuple[Path, Outcome, list[State]]:
        run, make = tmp_path_factory.mktemp("run"), EVERY_ENGINE[source.engine].make
        size = source.world_size
        answers = ranks(train_and_save, source.recipe, make, run, world_size=size)
        whole = outcome_of([(outcome, states[-1]) for outcome, states in answers])
        of_ranks = zip(*(states for _, states in answers), strict=True)
        return run, whole, [assembled(states) for states in of_ranks]

    return saved


def check(ranks, saved, target: Side, rows: Sequence[Row]) -> None:
    """Let ranks load every row; those of the same kind of run, or of another precision, train on."""
    sources = [saved(source) for source, _ in rows]
    paths = [checkpoint(run, step) for (run, *_), (_, step) in zip(sources, rows, strict=True)]
    trains_on = [source == target or source.precision != target.precision for source, _ in rows]
    answers = ranks(
        resume_each,
        target.recipe,
        EVERY_ENGINE[target.engine].make,
        list(zip(paths, trains_on, strict=True)),
        world_size=target.world_size,
    )
    for (source, step), (_, whole, states), *of_ranks in zip(rows, sources, *answers, strict=True):
        where = f"{target} after step {step} of {source}"
        require_state(assembled([state for state, _ in of_ranks]), states[step - 1], target, where)
        rest = [rest for _, rest in of_ranks if rest is not None]
        if source == target:
            require_rest(outcome_of(rest), whole, step, target)
        for outcome, _ in rest:
            assert torch.tensor(outcome.norms).isfinite().all(), where


def require_state(loaded: State, saved: State, target: Side, where: str) -> None:
    precision = PRECISIONS[target.precision]
    master, frozen = getattr(torch, precision.master), getattr(torch, precision.compute)
    assert loaded.keys() == saved.keys(), where
    for name, tensors in saved.items():
        assert loaded[name].keys() == tensors.keys(), f"{where}: {name}"
        for key, tensor in tensors.items():
            dtype = frozen if name.endswith(FROZEN) else master
            expected = tensor if key == "step" else tensor.to(dtype)
            assert loaded[name][key].dtype == expected.dtype, f"{where}: {name}.{key}"
            assert torch.equal(loaded[name][key], expected), f"{where}: {name}.{key}"


def require_rest(rest: Outcome, whole: Outcome, step: int, target: Side) -> None:
    """Require the rest of the run to the bit; where sums have another order, the first loss, and then rounding."""
    exact = target.world_size < 3 or target.engine not in ADDS_ANEW
    assert rest.losses[0] == whole.losses[step]
    if exact:
        assert (rest.losses, rest.norms) == (whole.losses[step:], whole.norms[step:])
    expected = Outcome(whole.losses[step:], whole.norms[step:], whole.state)
    assert_same(rest, expected, atol=0.0 if exact else FLOAT32_ROUNDING)


TABLE = table()


@every_nth(2, "target", TABLE, ids=str)
def test_a_pair(ranks, saved, target):
    check(ranks, saved, target, TABLE[target])


def with_deepspeed() -> dict[Side, list[Row]]:
    """Each of its stages loads each family's, and goes on; ours and torch's load each stage's."""
    rows: dict[Side, list[Row]] = {}
    for size, name in enumerate(DEEPSPEED, 1):
        own = Side(name, size)
        rows[own] = [(Side(family, size % 3 + 1), 2) for family in FAMILIES] + [(own, 1)]
    for again in (Side(name, precision="bf16_master") for name in DEEPSPEED):
        rows[again] = [(again, 1)]
    for family in ("zero2_parameter", "ddp_zero_redundancy", "fsdp2"):
        rows[Side(family)] = [(Side(name, size), 2) for size, name in enumerate(DEEPSPEED, 1)]
    return rows


@pytest.mark.parametrize(
    ("target", "rows"),
    [
        pytest.param(target, rows, id=f"{target}", marks=NEEDS_DEEPSPEED)
        for target, rows in with_deepspeed().items()
    ],
)
def test_a_pair_with_deepspeed(ranks, saved, target, rows):
    check(ranks, saved, target, rows)


@pytest.mark.wide
@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("name", ENGINES)
def test_all_pairs(ranks, saved, name, size):
    """Of engines and world sizes; each engine goes on after each step at each world size."""
    sources = [Side(*each) for each in itertools.product(ENGINES, (1, 2, 3))]
    again = Side(name, size)
    check(ranks, saved, again, [*((each, 2) for each in sources), (again, 1)])
