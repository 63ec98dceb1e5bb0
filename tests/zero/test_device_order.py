"""On a device with streams every use of memory waits for what it depends on, and ranks launch the same.

tests/device_order.py plays the device. Two worlds: one of real ranks, whose training is compared with one process, and
others whose peers do not exist, where each rank is played in turn and a bug can make no rank wait forever. The 43 bugs
of tests/mutation/order.toml are found by this file alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.device_order import PlayedDevice, played_device
from tests.oracle import (
    Recipe,
    assert_same,
    build_on_rank,
    outcome_of,
    pieces_of,
    run_steps,
    train_oracle,
)
from tests.strategies.engine import Ours
from zeroexp.comm import collective_layout
from zeroexp.comm.collective_layout import collective_layout_of
from zeroexp.cut.stage import STAGES
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor, Piece
from zeroexp.process.world import World, fake_world
from zeroexp.zero.engine import Engine
from zeroexp.zero.options import MIB, Options

PLAIN = Recipe()
LAYOUTS = ["parameter", "tensor", "buffer"]


@dataclass(frozen=True)
class Case:
    """What one engine is played with; with a `prefetch` of 2 several gathers are under way at once."""

    stage: str
    layout: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    recipe: Recipe = PLAIN
    apart: bool = False  # each rank's parameters by a call of their own, whatever padding costs

    def __str__(self) -> str:
        words = [self.stage, self.layout, *(f"{k}={v}" for k, v in self.options.items())]
        words += ["apart"] if self.apart else []
        return "-".join([*words, self.recipe.model, self.recipe.precision])

    def build(self, world: World) -> Engine:
        options = Options(layout=self.layout, transport="native", **self.options)
        engine = build_on_rank(world, self.recipe, Ours(self.stage, options, Engine))
        assert isinstance(engine, Engine)
        return engine


def more(
    stage: str,
    layout: str = "tensor",
    *,
    recipe: Recipe = PLAIN,
    apart: bool = False,
    **options: Any,
) -> Case:
    return Case(stage, layout, options, recipe, apart)


BFLOAT16, CLIPPED = Recipe(precision="bf16_master"), Recipe(max_grad_norm=0.1)
CASES = [
    *(more("zero3", layout, prefetch=2) for layout in ("parameter", "buffer")),
    *(more("zero2", "buffer", prefetch=2), more("zero1_allreduce", "buffer", prefetch=2)),
    more("zero1", bucket_mb=100 / MIB, prefetch=2),
    more("zero1", "buffer", recipe=BFLOAT16),
    more("zero1", "buffer", publish="forward"),
    more("zero1_allreduce", "parameter", publish="forward"),
    more("zero3", replicas=2, recipe=Recipe(world_size=4)),
    more("zero3", "parameter", apart=True),
    more("zero3", keep="all"),
    more("zero3", "buffer", masters_rest=True, prefetch=2, recipe=BFLOAT16),
    more("zero2", recipe=CLIPPED),
    more("zero3", "parameter", offload="all", recipe=BFLOAT16),
    more("zero2", offload="optimizer", offload_fraction=0.4, recipe=CLIPPED),
    more("zero3", "buffer", offload="all", prefetch=2, recipe=Recipe(world_size=1)),
    more("zero3", prefetch=2, recipe=Recipe(model="reused", checkpointing=True)),
]
# Each has one of the above beside it that differs in a setting or two.
OTHERS = [
    *(more(stage, prefetch=2) for stage in ("ddp", "zero1", "zero3")),
    *(more(stage, "parameter", prefetch=2) for stage in ("zero1", "zero2")),
    *(more("ddp", bucket_mb=100 / MIB, prefetch=2), more("zero3", bucket_mb=100 / MIB)),
    more("zero2", publish="forward"),
    more("zero1", replicas=2, publish="forward", recipe=Recipe(world_size=4)),
    *(more("zero3", "buffer", recipe=BFLOAT16), more("zero2", "parameter", apart=True)),
    *(more(stage, reductions_apart=True, prefetch=2) for stage in ("zero2", "zero3")),
    more("zero3", overlap=False),
    more("zero3", reduce_each="microbatch", prefetch=2),
    more("zero3", masters_rest=True, prefetch=2, recipe=BFLOAT16),
    more("zero3", "buffer", offload="optimizer", recipe=BFLOAT16),
    more("zero2", offload="optimizer", recipe=CLIPPED),
    more("zero1", offload="optimizer", offload_folder=".", recipe=Recipe(moments="bfloat16")),
    more("zero3", offload="all", prefetch=2),
    more("zero3", offload="all", offload_fraction=0.4, prefetch=2),
    *(more(stage, recipe=Recipe(model="moe_one_rank")) for stage in ("zero2", "zero3")),
]
TABLE = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)]


class NeverDrained:
    """An engine whose steps leave in flight what they may."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, *, drain: bool) -> Tensor:
        return self._engine.step()


def train(engine: Engine, world: World, recipe: Recipe) -> None:
    """Steps, and between them all that a program may do with the weights.

    In the first one all ranks have the same gradients: ranks that do not exist can not say that theirs differ.
    """
    strategy: Any = NeverDrained(engine)
    run_steps(strategy, replace(world, rank=0), recipe, range(1))
    run_steps(strategy, world, recipe, range(1, 2))
    # What is published in forward an unobserved program has to drain before it reads.
    if not any(unit.is_sharded or unit.is_awaited for unit in engine.units):
        read_all(engine)
    run_steps(strategy, world, recipe, range(2, 3))
    with torch.no_grad():
        engine.model(input_ids=torch.zeros(1, 3, dtype=torch.int64))
    with engine.gathered(write=True):
        read_all(engine)
    if not any(unit.is_sharded for unit in engine.units):
        read_all(engine)
    run_steps(strategy, world, recipe, range(3, 4))
    with skipped_block(engine.model):
        run_steps(strategy, world, recipe, range(3, 4))
    engine.load_state_dict(state_of(recipe))
    run_steps(engine, world, recipe, range(4, 5))


@contextmanager
def skipped_block(model: Any) -> Iterator[None]:
    """Leave a block of a toy out on all ranks: what was gathered ahead of it is in vain."""
    order, model.order = getattr(model, "order", ()), (0, 2)
    yield
    model.order = order


def read_all(engine: Engine) -> list[Tensor]:
    return [parameter.detach().sum() for parameter in engine.model.parameters()]


def state_of(recipe: Recipe) -> CanonicalState:
    """A whole state, as if all ranks had given their pieces."""

    def whole(tensor: Tensor) -> CanonicalTensor:
        return CanonicalTensor(tuple(tensor.shape), tensor.dtype, [Piece(0, tensor.reshape(-1))])

    state = train_oracle(recipe).state
    return {
        name: {key: whole(each) for key, each in of_one.items()} for name, of_one in state.items()
    }


@contextmanager
def calls_apart() -> Iterator[None]:
    collective_layout_of.cache_clear()
    with mock.patch.object(collective_layout, "OPERATION_BYTES", 0):
        yield
    collective_layout_of.cache_clear()


def played(case: Case, rank: int) -> PlayedDevice:
    """This rank of the case, in a world whose other ranks do not exist."""
    with (
        fake_world(rank, case.recipe.world_size) as world,
        calls_apart() if case.apart else nullcontext(),
    ):
        engine = case.build(world)
        engine._reads_late = case.stage == "zero3"  # as on a GPU, where all stages do
        with played_device() as device:
            device.knows(engine)
            train(engine, world, case.recipe)
    return device


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_every_use_waits_for_what_it_needs_and_ranks_launch_the_same(case):
    """Of two groups of two, a rank of each: they differ in both places."""
    size = case.recipe.world_size
    devices = [played(case, rank) for rank in range(0, size, max(size - 1, 1))]
    found = [[*device.problems, *device.never_waited()] for device in devices]
    assert found == [[] for _ in devices]
    assert all(device.launches == devices[0].launches for device in devices)
    assert devices[0].launches
    streams = 1 + case.options.get("reductions_apart", False) + 2 * ("replicas" in case.options)
    assert len(devices[0].streams) == streams


def trained(world: World, case: Case) -> tuple[Any, list[str], list[Any]]:
    """What a real rank ends with, and what its device saw."""
    engine = case.build(world)
    with played_device() as device:
        device.knows(engine)
        outcome = run_steps(engine, world, case.recipe, range(case.recipe.steps))
    return (outcome, pieces_of(engine)), device.problems, device.launches


@pytest.mark.parametrize(("stage", "layout"), [*zip(STAGES, LAYOUTS * 2, strict=False)])
def test_what_equals_one_process_is_in_order(ranks, stage, layout):
    case = Case(stage, layout, {"prefetch": 2})
    answers = ranks(trained, case)
    assert_same(outcome_of([answer for answer, _, _ in answers]), train_oracle(case.recipe))
    (_, *first), (_, *second) = answers
    assert first == second == [[], first[1]]


# -- the checker itself ---------------------------------------------------------------------------


def reads_too_early(full: Tensor, piece: Tensor) -> None:
    gathering(full, piece)
    full.sum()


def writes_what_is_sent(full: Tensor, piece: Tensor) -> None:
    gathering(full, piece)
    piece.add_(1)


def frees_too_early(full: Tensor, piece: Tensor) -> None:
    gathering(full, piece)
    full.untyped_storage().resize_(0)


def gathers_freed_memory(full: Tensor, piece: Tensor) -> None:
    full.untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match="freed"):
        gathering(full, piece)


def waits(full: Tensor, piece: Tensor) -> None:
    piece.add_(1)
    work = gathering(full, piece)
    piece.sum()
    work.wait()
    full.sum()
    piece.add_(1)


def gathering(full: Tensor, piece: Tensor) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(full, piece, async_op=True)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (waits, ""),
        (reads_too_early, "sum reads what all_gather"),
        (writes_what_is_sent, "add_ writes what all_gather"),
        (frees_too_early, "to free it writes what all_gather"),
        (gathers_freed_memory, "uses memory that is freed"),
    ],
)
def test_what_a_played_device_finds(program, problem):
    with fake_world(0, 2), played_device() as device:
        full, piece = torch.zeros(8), torch.ones(4)
        program(full, piece)
    assert len(device.problems) == bool(problem) and problem in "".join(device.problems)
