"""A step reads no value of a tensor: on a GPU each reading stops the host, which can not run ahead then.

The device is played on the CPU: readings raise between the beginning of a microbatch and the end of the step, and in
whole steps of a run.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock, PropertyMock, patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.composing import composed
from zeroexp.comm.collectives import TRANSPORTS
from zeroexp.comm.native import Native
from zeroexp.cut.stage import STAGES
from zeroexp.data import Microbatch
from zeroexp.data.batches import build_data
from zeroexp.engines.build import build_strategy
from zeroexp.engines.sharded import Sharded
from zeroexp.measure.memory import AllocationMeter
from zeroexp.measure.record import StepRecord
from zeroexp.models.module import build_model
from zeroexp.process.world import World
from zeroexp.training import loop
from zeroexp.zero.assemble import bit_checksum
from zeroexp.zero.options import Dtypes, Options

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class NothingIsRead(TorchDispatchMode):
    num_allowed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_allowed -= func in READS
        assert self.num_allowed >= 0, f"{func} reads a value"
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_is_read() -> Iterator[None]:
    def read(tensor: Tensor) -> None:
        raise AssertionError("tolist reads values")

    with NothingIsRead(), patch.object(Tensor, "tolist", read):
        yield


def build(
    world: World, stage: str, layout: str = "buffer", compute: torch.dtype = torch.float32
) -> Sharded:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    strategy = Sharded(
        model,
        blocks=["0", "2"],
        stage=STAGES[stage],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.1),
        world=world,
        dtypes=Dtypes(compute, torch.float32, torch.float32),
        max_grad_norm=0.1,
        options=Options(layout=layout, transport="native"),
    )
    strategy._reads_late = True
    return strategy


def run_step(strategy: Sharded, world: World, step: int, *, drain: bool = False) -> Tensor:
    inputs = torch.randn(2, 5, generator=torch.manual_seed(2 * step + world.rank))
    for last in (False, True):
        with strategy.microbatch(last=last):
            compute = next(strategy.model.parameters()).dtype
            strategy.backward(strategy.model(inputs.to(compute)).square().sum())
    norm = strategy.step(drain=drain)
    strategy.zero_grad()
    return norm


def train(world: World, stage: str, layout: str, compute: torch.dtype) -> list[float]:
    strategy = build(world, stage, layout, compute)
    norms: list[Tensor] = []
    for step in range(4):
        # The first microbatch compares the ranks, and the refusals look at values in the first steps.
        with nothing_is_read() if step > 2 else torch.enable_grad():
            norms.append(run_step(strategy, world, step))
    return [norm.item() for norm in norms]


# Each stage with each layout in turns, and each layout under the one that gathers.
PAIRS = [
    *zip(STAGES, ["parameter", "tensor", "buffer"] * 2, strict=False),
    *(("zero3", layout) for layout in ("parameter", "buffer")),
]
CASES = [(*pair, (torch.float32, torch.bfloat16)[index % 2]) for index, pair in enumerate(PAIRS)]


@pytest.mark.parametrize(("stage", "layout", "compute"), CASES)
def test_a_step_reads_no_value(ranks, stage, layout, compute):
    first, second = ranks(train, stage, layout, compute)
    assert first == second and all(norm > 0.1 for norm in first), "and it clips"


def test_a_checksum_reads_one_value_of_a_tensor_of_many_parts():
    """And parts in another order have another sum."""
    values, sums = torch.randn(1 << 18), []
    for each in (values, values.clone(), values.roll(1 << 16)):
        with NothingIsRead() as reads:
            reads.num_allowed = 1
            sums.append(bit_checksum(each))
    assert sums[0] == sums[1] != sums[2]


def gradients_left(world: World, stage: str) -> int:
    """Return how many gradients of a step the engine holds after it, though nothing reads them any more."""
    strategy, given = build(world, stage), list[Any]()
    step_optimizer = strategy._step_optimizer

    def step(masters: Any, gradients: Any) -> None:
        given.extend(map(weakref.ref, gradients))
        step_optimizer(masters, gradients)

    with patch.object(strategy, "_step_optimizer", step):
        run_step(strategy, world, 0)
    assert given
    gc.collect()
    return sum(each() is not None for each in given)


@pytest.mark.parametrize("stage", ["ddp", "zero3"])
def test_what_is_read_late_keeps_no_gradients(ranks, stage):
    assert ranks(gradients_left, stage) == [0, 0]


def told_of_the_last_step(world: World) -> list[str]:
    """Return who raises where the ranks gathered differently in the last step of all."""
    told = []
    for way in ("drain", "state_dict", "model_states", "step"):
        strategy = build(world, "zero3")
        run_step(strategy, world, 0)
        differing = patch.object(
            Native, "issued_checksum", new_callable=PropertyMock, return_value=world.rank
        )
        try:
            with differing:
                run_step(strategy, world, 1, drain=way == "step")
            getattr(strategy, way)()
        except RuntimeError as error:
            assert "used their blocks in different orders" in str(error)
            told.append(way)
    return told


def test_who_drains_or_saves_reads_whether_the_last_step_was_right(ranks):
    assert ranks(told_of_the_last_step) == [["drain", "state_dict", "model_states", "step"]] * 2


# -- the loop around it -----------------------------------------------------------------------------


class PlayedEvent:
    def __init__(self, **_: Any) -> None:
        self._at = 0.0

    def record(self, stream: object) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: PlayedEvent) -> float:
        return 1e3 * (end._at - self._at)


@contextmanager
def played_gpu() -> Iterator[None]:
    """Let the loop, its clocks and the engine do as on a GPU."""
    with (
        patch.object(World, "timed_device", GPU),
        patch.object(torch.cuda, "Event", PlayedEvent),
        patch.object(torch.cuda, "current_stream", Mock()),
        patch.object(loop, "AllocationMeter", lambda _: AllocationMeter(CPU)),
    ):
        yield


def run_of(world: World, on_gpu: bool) -> list[StepRecord]:
    """Train a small llama through the loop; on the played GPU nothing is read from the fourth step to the last one."""
    batch = ("world_size=2", "data.global_batch_size=4", "data.micro_batch_size=1")
    steps = ("train.warmup_steps=1", "train.steps=13", "data.seq_len=8")
    config = composed("model=tiny", "data=synthetic", "strategy=zero3", *batch, *steps)
    data = build_data(config.data, config.model, 0)
    model = build_model(config.model, seed=0, vocab_size=data.vocab_size)
    records: list[StepRecord] = []
    with (
        patch.dict(TRANSPORTS, auto=TRANSPORTS["native"]),
        played_gpu() if on_gpu else nullcontext(),
    ):
        strategy = build_strategy(config, model, world)
        assert isinstance(strategy, Sharded)
        strategy._reads_late = on_gpu
        trained = loop.train(strategy, data, config=config, world=world)
        for index in range(14):
            # The last one, which is drained, meets at a barrier and reads the memory, is read by itself.
            with nothing_is_read() if on_gpu and 2 < index < 12 else nullcontext():
                records.append(next(trained))
        assert next(trained, None) is None
    return records


def test_no_step_of_a_run_reads_a_value_before_the_next_one_runs(ranks):
    played, plain = (ranks(run_of, on_gpu)[0] for on_gpu in (True, False))
    assert [record.loss for record in played] == [record.loss for record in plain]
    assert [record.grad_norm for record in played] == [record.grad_norm for record in plain]
    timed = [record.step for record in played if record.verbs]
    assert timed == [0, 1, 11], "the first is traced, and what step 10 marks is for the next one"
    assert all(record.waited_seconds == {} for record in played[1:]), "the stream waits"
    # What the step before gathered ahead is timed too, by the same clock.
    counts = [{verb: each.count for verb, each in run[11].verbs.items()} for run in (played, plain)]
    assert counts[0] == counts[1] and counts[0]["gather"] > 0


# -- copies between host and device -----------------------------------------------------------------


class CopiesGoOn(TorchDispatchMode):
    """Raises where the host would wait for a copy: a blocking one, or one of memory that is not pinned."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned: list[torch.UntypedStorage] = []
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._pinned.append(result.untyped_storage())
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        is_copy = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        if is_copy and len({each.device for each in (*tensors, result)}) > 1:
            self.num_copies += 1
            # Of `copy_` it is the third argument.
            assert kwargs.get("non_blocking") or args[2:] == (True,), f"{func} waits"
            for each in tensors:
                assert each.is_cuda or each.untyped_storage() in self._pinned, (
                    f"{func} waits for memory that is not pinned"
                )
        return result


def test_the_host_waits_for_no_copy():
    """The device is one of tensors without values."""
    event = Mock()
    world = World(0, 2, GPU, "nccl")
    batch = Microbatch({"input_ids": torch.ones(2, 8).long()}, torch.ones(2, 8).long())
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        CopiesGoOn() as copies,
        patch.object(torch.cuda, "Event", event),
        patch.object(torch.cuda, "current_stream", Mock()),
    ):
        carried = batch.to(GPU)
        assert carried.labels.is_cuda and carried.inputs["input_ids"].is_cuda
        world.read_later(torch.zeros(2, device=GPU))
    assert copies.num_copies == 3
    assert [name for name, *_ in event.mock_calls] == ["", "().record"], "who reads waits for it"
