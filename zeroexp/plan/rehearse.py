"""A rehearsal: the real model, engine and training loop run as one rank of any world, on tensors without memory.

Parameters, activations and buffers are fake tensors, and the other ranks do not exist. So a laptop sees what one of
1,024 ranks will hold at every moment, activations included. All that runs is the code of a real rank: `build_model`,
`build_strategy` and `train`. There is no formula of a strategy here.

    last = rehearse(config, 63)
    last.peak_bytes, last.peaks["backward"].by_kind

[Note: three steps] The first step makes the optimizer's state and finds the order of units. Peaks and traffic are those
of the second, which nothing disturbs. The third, which runs where model states are asked for, is read at the named
moments, where the engine waits for what is in flight.

[Note: checkpoints] From its first save on, a CPU rank holds a copy of its state, which later saves reuse. A run that
saves before its last step trains beside that copy: its rehearsal saves after every step, so the second has a copy. A
run that saves at its end alone holds the copy beside what rests between steps: its rehearsal saves after the second.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor

import zeroexp
from zeroexp.check.rules_machine import num_gpus
from zeroexp.checkpoint.staging import Staging, flat_state
from zeroexp.config.keys import Config, ConfigError, UndefinedCombination
from zeroexp.config.vocabulary import vocab_size_of_data
from zeroexp.data.batches import Data
from zeroexp.engines.build import build_strategy
from zeroexp.interface.strategy import Strategy
from zeroexp.measure.record import KINDS, OUTER, StepRecord, Traffic
from zeroexp.models.checkpointing import checkpoint_as_configured
from zeroexp.models.module import build_model, materialize, patched_for_fake_tensors
from zeroexp.plan.caching_allocator import Change
from zeroexp.plan.hidden_memory import AutogradSums, HostMemory
from zeroexp.plan.speed import Speed
from zeroexp.plan.stand_ins import NoData, absent_neighbours, buckets_in_python
from zeroexp.plan.storages import PhasePeak, Storages
from zeroexp.plan.timing import Seconds, Timeline
from zeroexp.process.world import fake_world
from zeroexp.training.loop import train

NUM_STEPS, UNDISTURBED_STEP = 3, 1  # [Note: three steps]
CHECKPOINT = "checkpoint copy"
PHASES = ("forward", "backward", "step")
OURS, TORCH = (str(Path(module.__file__ or "").parent) for module in (zeroexp, torch))
WATCHING = (TORCH, str(Path(__file__).parent))  # whose code runs below each operation
ASKS_FOR_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True)
class RehearsedRank:
    """What a rehearsed rank held and sent. Numbers are bytes, but for `traffic.calls_by_kind`."""

    rank: int
    device: str  # cpu or cuda, whose kernels decide what autograd saves; cuda needs a GPU
    peaks: dict[str, PhasePeak]  # by phase: build, then each of PHASES in the undisturbed step
    traffic: Traffic  # of one step
    seconds: dict[str, Seconds]  # by phase, what is estimated; nothing without a speed
    # Moment -> kind -> model states, as a run's record has them; where they were asked for.
    held_bytes: dict[str, dict[str, int]]
    # What is allocated after the build and in the first step, then in the undisturbed one, see Storages.changes.
    changes: tuple[list[Change], list[Change]] = field(repr=False, compare=False)

    @property
    def peak_phase(self) -> str:
        return max(PHASES, key=lambda phase: self.peaks[phase].num_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that live at once in a step: model states, activations and temporaries."""
        return self.peaks[self.peak_phase].num_bytes


def rehearse(
    config: Config,
    rank: int = 0,
    *,
    reads: bool = False,
    speed: Speed | None = None,
    ranks_per_host: int | None = None,
    most_microbatches: int | None = None,
) -> RehearsedRank:
    """Rehearse one rank of a configured point, without weights and data, in a process that has no process group.

    reads: whether model states are read at the named moments, in a third step. speed: of the machines whose seconds are
    estimated; None estimates none. ranks_per_host: how many CPU ranks follow one another on a host, where they read
    each other's memory; hosts send messages; None: all ranks move as GPUs do. most_microbatches: so many of a step are
    run; None runs all. Raises ConfigError in one line for what can not be rehearsed.
    """
    config = config_to_rehearse(config)
    size, device = config.world_size, "cpu" if ranks_per_host else _device(config)
    assert 0 <= rank < size
    words = vocab_size_of_data(config)
    model = build_model(config.model, seed=config.train.seed, device="meta", vocab_size=words)
    mode = FakeTensorMode()
    storages = Storages(mode, torch.device(device), num_logits(model.module))
    timeline = Timeline(speed)
    with (
        _needs_of_values_told(config.model.family),
        fake_world(rank, config.world_size, device) as world,
        patched_for_fake_tensors(config.model),
        buckets_in_python(),
        mode,
        storages,
        HostMemory(storages) if ranks_per_host else nullcontext(),
        absent_neighbours(storages, ranks_per_host),
        timeline,
        AutogradSums(),
    ):
        materialize(model.module, device)
        checkpoint_as_configured(model.module, model.blocks, config.train)
        stand_for = _stand_for(config, most_microbatches)
        watched = _Watched(build_strategy(config, model, world), storages, timeline, stand_for)
        strategy = cast(Strategy, watched)  # what it does not watch goes to the engine
        no_data = NoData(config, most_microbatches, holds_others=bool(ranks_per_host))
        steps = train(
            strategy, cast(Data, no_data), config=config, world=world, pause=lambda _: True
        )
        if device == "cpu":
            steps = _beside_checkpoints(steps, strategy, storages, config)
        next(steps)  # [Note: three steps]
        watched.forget_phases()
        traffic, seconds = next(steps).traffic, timeline.phases
        peaks, changes = storages.peaks(), storages.changes()
        watched.forget_phases()
        held = next(steps).memory_bytes if reads else None
    return RehearsedRank(rank, device, peaks, traffic, seconds, held or {}, changes)


def config_to_rehearse(config: Config) -> Config:
    """Return a copy of the config as it is rehearsed: three steps, without weights to read, validation and files."""
    config = deepcopy(config)
    outer, checkpoint = config.strategy.outer, config.checkpoint
    if outer.every is not None:  # the undisturbed step ends with an outer one
        outer.every = min(outer.every, UNDISTURBED_STEP + 1)
    if checkpoint.every is not None:  # [Note: checkpoints]
        in_training = checkpoint.every < config.train.warmup_steps + config.train.steps
        checkpoint.every = 1 if in_training else UNDISTURBED_STEP + 1
        outer.every = outer.every and checkpoint.every  # only after an outer step there is a state
    config.train.warmup_steps, config.train.steps = 0, NUM_STEPS
    config.train.trace_steps, config.train.profile_steps = [], []  # a plan leaves no file
    config.model.weights = None
    config.data.validation_split = config.data.validation_samples = None
    return config


def _stand_for(config: Config, most: int | None) -> list[float]:
    """Return for how many microbatches of a step each rehearsed one stands.

    The first and the last, which alone may gather or reduce, stand for themselves, and those between for the rest. Of
    two the first stands for all but the last.
    """
    data = config.data
    num = data.global_batch_size // (data.micro_batch_size * config.world_size)
    rehearsed = min(num, most or num)
    stand_for = [1.0] * rehearsed
    between = range(1, rehearsed - 1) if rehearsed > 2 else range(1)
    for number in between:
        stand_for[number] += (num - rehearsed) / len(between)
    return stand_for


def _device(config: Config) -> str:
    """Return whose kernels are rehearsed of a rank that moves as GPUs do: without a GPU those of the CPU.

    A torch that was built for CUDA asks a real device for its streams in each backward, also in one of fake tensors.
    """
    has_cuda = torch.backends.cuda.is_built() and num_gpus() > 0
    return "cuda" if has_cuda and config.cluster.device != "cpu" else "cpu"


def _beside_checkpoints(
    steps: Iterator[StepRecord], strategy: Strategy, storages: Storages, config: Config
) -> Iterator[StepRecord]:
    """Yield the records, and stage on a CPU what a run saves after each, see [Note: checkpoints]."""
    every, staging = config.checkpoint.every, Staging(torch.device("cpu"))
    for record in steps:
        if every and (record.step + 1) % every == 0:
            staged = staging.copy(flat_state(strategy))
            copies = [piece.tensor for each in staged.values() for piece in each.pieces]
            storages.assign_kind(CHECKPOINT, copies)
        yield record


@contextmanager
def _needs_of_values_told(family: str) -> Generator[None]:
    """Raise ConfigError for what a model or an optimizer can not do without values, or in this engine at all."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, RuntimeError) and frames[-1].filename.startswith(OURS):
            raise ConfigError(
                f"the engine refuses what the model does, as in a run: {error}"
            ) from error
        last = [frame for frame in frames if not frame.filename.startswith(WATCHING)][-1]
        if last.filename.startswith(OURS):
            if not isinstance(error, ASKS_FOR_VALUES):
                raise
            raise UndefinedCombination(
                f"model.family={family}: its forward decides by values, as by which experts tokens chose, or the "
                "optimizer's step does, so that it can not be rehearsed; the closed forms plan it"
            ) from error
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(
            f"{Path(last.filename).name}, line {last.lineno}, can not run on tensors without values ({message}); "
            "the closed forms plan it"
        ) from error


def num_logits(module: nn.Module) -> int | None:
    """Return the number of words that the model chooses from at each position; None where it chooses none."""
    rows = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    return max(rows, default=None)


class _Watched:
    """A strategy that tells in which phase the loop is, and what the engine holds when backward is over."""

    def __init__(
        self, strategy: Strategy, storages: Storages, timeline: Timeline, stand_for: Sequence[float]
    ) -> None:
        """stand_for: for how many microbatches of a step each one stands."""
        self._strategy, self._storages, self._timeline = strategy, storages, timeline
        self._num_steps, self._stand_for, self._left = 0, stand_for, [*stand_for]
        # FSDP2 frees what it gathered before backward is over.
        for module in strategy.model.modules():
            if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._name_gathered)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def _name_gathered(self, module: nn.Module, _inputs: Any) -> None:
        own = module.parameters(recurse=False)
        self._storages.assign_kind("buffers", (p for p in own if not isinstance(p, DTensor)))

    def _begin(self, phase: str, times: float = 1.0) -> None:
        self._storages.begin_phase(phase)
        self._timeline.enter(phase, times)

    def forget_phases(self) -> None:
        """Leave what happened since the build out of peaks and seconds."""
        self._storages.forget_phases()
        self._timeline.forget()

    @contextmanager
    def microbatch(self, *, last: bool) -> Generator[None]:
        self._begin("forward", self._left[0])
        with self._strategy.microbatch(last=last):
            yield

    def backward(self, loss: Tensor) -> None:
        self._begin("backward", self._left.pop(0))
        self._strategy.backward(loss)

    def step(self, *, drain: bool) -> Tensor:
        if self._num_steps == UNDISTURBED_STEP:
            states = self._strategy.model_states()  # waits for reductions, as the step does at once
            for kind in (*KINDS, OUTER):
                self._storages.assign_kind(kind, getattr(states, kind))
            del states  # moments of few bytes end in the step, which makes others
        self._begin("step")
        self._num_steps += 1
        self._left = [*self._stand_for]
        return self._strategy.step(drain=drain)
