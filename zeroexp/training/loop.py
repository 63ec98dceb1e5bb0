"""The training loop: everything else serves these lines.

A step ends when its parameters are updated and its loss and gradient norm are known. An engine may leave its last
all-gathers in flight, since the next step waits for them. At both ends of the measured window nothing is in flight: the
last warm-up step and the last step of the run drain the engine and meet at a barrier, and their time includes both.

[Note: reading memory] The bytes held are read at the four MOMENTS of the last warm-up step, which counts in no time.
A resumed run has warm-up steps of its own. One with less than two of them reads in its last step, since in the first
step of all the optimizer has no moments yet. The clock stands still meanwhile.

[Note: validation] It runs between two steps, and no step counts its time, bytes or memory. The step before it drains
the engine within its own time, and the ranks meet before the next one begins.

[Note: one step late] On a GPU the host runs ahead of the device. The loop reads a step's numbers there when it has
launched the next step, so that the device never waits for the read: they were copied behind their own step, to pinned
memory, as each microbatch is before its forward. Requests to stop are read with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import nan
from pathlib import Path

import torch
from torch import Tensor

from zeroexp.comm.collectives import Collectives, held_shared_bytes, take_traffic
from zeroexp.config.keys import Config, TrainConfig
from zeroexp.data import Microbatch
from zeroexp.data.batches import Data
from zeroexp.interface.loss_scale import SCALE
from zeroexp.interface.strategy import Strategy
from zeroexp.measure.clock import StepClock
from zeroexp.measure.communication_overlap import TimedMove, meter, sum_up_moves
from zeroexp.measure.drift import read_between_steps
from zeroexp.measure.dtypes_found import DtypeRecorder
from zeroexp.measure.instruments import Instruments
from zeroexp.measure.memory import AllocationMeter, bytes_by_kind
from zeroexp.measure.record import StepRecord, Traffic
from zeroexp.measure.tcp_bytes import ByteMeter, link_bytes, wire_meter
from zeroexp.measure.trace import StepTrace
from zeroexp.models.loss import loss_sum
from zeroexp.process import progress
from zeroexp.process.world import World, barrier
from zeroexp.training.agree_to_stop import Stop
from zeroexp.training.learning_rate import learning_rate
from zeroexp.training.validate import validate, validated_steps

GPU_TIMES_EVERY = 10  # steps, of which one has its moves timed


def train(
    strategy: Strategy,
    data: Data,
    *,
    config: Config,
    world: World,
    start_step: int = 0,
    stop: Stop | None = None,
    pause: Callable[[int], bool] = lambda steps_done: False,
    instruments: Instruments | None = None,
) -> Iterator[StepRecord]:
    """Train to the configured number of steps, or until all ranks agree to stop.

    Yields one record per step; its loss is the same on every rank. Between two steps every rank calls `pause` with the
    number of steps done. Where it returns True, the caller receives that step's record before the next step starts, so
    it finds the engine as that step left it and may save it. The same holds after the last record. `instruments` watch
    the steps that they choose.
    """
    stop = stop or Stop()
    unread: deque[_Step] = deque()
    run = _Run(strategy, data, config, world, stop, instruments, start_step)
    take_traffic()  # what building and loading sent counts in no step
    for index in range(start_step, run.num_steps):
        step = run.take_step(index)
        if index in run.validated:  # [Note: validation]
            run.validate_after(step)
        unread.append(step)
        pauses = pause(index + 1)
        most_unread = 0 if pauses else int(world.timed_device.type == "cuda")
        while len(unread) > most_unread:  # [Note: one step late]
            done = unread.popleft()
            record = done.read()
            stop.agreed = stop.agreed or done.num_wishes > 0
            yield record
        if pauses:
            run.forget_bytes()
        if stop.agreed and (index + 1) % (config.strategy.outer.every or 1) == 0:
            break  # seldom synchronised replicas can be saved after an outer step alone
    for step in unread:
        yield step.read()


class _Run:
    """The steps of one run: what each trains on, what is measured of it, and which end the measured window."""

    def __init__(
        self,
        strategy: Strategy,
        data: Data,
        config: Config,
        world: World,
        stop: Stop,
        instruments: Instruments | None,
        start_step: int,
    ):
        self._strategy, self._data, self._config, self._stop = strategy, data, config, stop
        self._world, self._collectives = world, Collectives(world)
        self._wire, self._link = wire_meter(world.backend), ByteMeter(link_bytes)
        self._replica = config.grid.group(world.rank) if config.strategy.outer.every else None
        self._instruments = instruments or Instruments(TrainConfig(), world, Path())
        self.num_steps = config.train.warmup_steps + config.train.steps
        self._num_warmup = num_warmup = first_measured_step(config, start_step)
        self.validated = validated_steps(config)
        self._window_ends = {num_warmup - 1, self.num_steps - 1}
        # torch's profiler corrupts memory where it ends while work of gloo is in flight.
        self._drained = {*self._window_ends, *self.validated, *config.train.profile_steps}
        in_warmup = num_warmup > start_step + 1
        self._reading_step = num_warmup - 1 if in_warmup else self.num_steps - 1

    def take_step(self, index: int) -> _Step:
        """Train one step, and let the instruments write what they saw of it."""
        reads, instruments = index == self._reading_step, self._instruments
        by_cause = index == self._num_warmup - 1
        watching = instruments.watching(index, self._strategy, reading=reads, by_cause=by_cause)
        with watching as trace, self._timing_moves(index, trace) as moves:
            dtypes = instruments.dtypes if reads else None
            warmup = index < self._num_warmup
            step = _Step(self._world, index, self._config, warmup, dtypes=dtypes, trace=trace)
            num_tokens = self._accumulate_gradients(step)
            self._update_parameters(step)
        step.end(num_tokens, moves)
        step.record.wire_bytes = self._wire.take_bytes()
        step.record.traced = instruments.slows(index)
        instruments.write_timeline(index, trace, step.record.peak)
        if step.record.traced:
            barrier()  # no rank waits in its next step for another one that still writes what it saw
        return step

    def validate_after(self, step: _Step) -> None:
        task, record = self._config.model.task, step.record
        found = validate(self._strategy, self._data, self._collectives, task=task, step=record.step)
        record.validation_loss, record.validation_accuracy = found.loss, found.accuracy
        self.forget_bytes()

    def forget_bytes(self) -> None:
        """Count what was sent since the last step in none; else it counts in the next, as what a gather ahead sends."""
        self._wire.take_bytes()
        self._link.take_bytes()

    @contextmanager
    def _timing_moves(self, index: int, trace: StepTrace | None) -> Iterator[list[TimedMove]]:
        """Time the moves of a step; on a GPU, where each mark is an event that the host records, of every tenth one.

        The step before it marks its own too, since what it gathers ahead ends in the timed one.
        """
        device = torch.device("cpu") if trace is not None else self._world.timed_device
        until_timed = (self._num_warmup - index) % GPU_TIMES_EVERY if device.type != "cpu" else 0
        with meter.recording(device) if until_timed <= 1 else nullcontext([]) as moves:
            yield moves if until_timed == 0 else []

    def _accumulate_gradients(self, step: _Step) -> int:
        """Run forward and backward of this rank's microbatches, and return their number of tokens."""
        strategy, world = self._strategy, self._world
        index, record = step.record.step, step.record
        record.lr = learning_rate(self._config.optimizer, index, self.num_steps)
        for group in strategy.optimizer.param_groups:
            group["lr"] = record.lr * group.get("lr_scale", 1.0)
            record.loss_scale = group.get(SCALE)
        first_sample = index * self._config.data.global_batch_size
        batch = self._data.step_batch(
            first_sample, rank=world.rank, world_size=world.size, replica=self._replica
        )
        for microbatch in batch.microbatches:
            last = microbatch is batch.microbatches[-1]
            with strategy.microbatch(last=last):
                step.enter(progress.FORWARD)
                loss = _loss_sum(strategy, microbatch, world, self._config.model.task)
                # A step of a plugin's data may have no label that counts.
                loss = loss / max(batch.num_valid, 1)
                if last:
                    step.read_memory("after_forward", strategy)
                step.enter(progress.BACKWARD)
                strategy.backward(loss)  # of ours in zero/engine.py
            step.loss += loss.detach()
        step.read_memory("after_backward", strategy)
        return batch.num_tokens

    def _update_parameters(self, step: _Step) -> None:
        strategy, ends_window = self._strategy, step.record.step in self._window_ends
        step.enter(progress.STEP)
        if self._stop.asked:
            step.wishes.fill_(1)
        sums = self._collectives.sum_scalar_later(step.sums, "loss")  # overlaps the engine's step
        with step.clock.timing_optimizer(strategy.optimizer):
            step.grad_norm = strategy.step(drain=step.record.step in self._drained)
        step.read_memory("after_step", strategy)
        strategy.zero_grad()
        sums.wait()
        if ends_window:
            barrier()
        step.record.link_bytes = self._link.take_bytes()
        if ends_window and step.record.link_bytes is not None:
            barrier()  # no rank of a node sends on before the others have read too
        step.read_memory("at_rest", strategy)
        step.clock.stop()


def first_measured_step(config: Config, start_step: int) -> int:
    """Return the first step that counts in times: a process that resumes is as cold as one that begins."""
    last = config.train.warmup_steps + config.train.steps - 1  # it counts always
    return min(start_step + config.train.warmup_steps, last)


def _loss_sum(strategy: Strategy, microbatch: Microbatch, world: World, task: str) -> Tensor:
    """Return the loss; the model's output is freed when this function returns, before backward."""
    microbatch = microbatch.to(world.device)
    return loss_sum(strategy.model(**microbatch.inputs), microbatch.labels, task)


class _Step:
    """The meters of one step, and its record, which is whole once `read` has waited for the device."""

    def __init__(
        self,
        world: World,
        index: int,
        config: Config,
        warmup: bool,
        *,
        dtypes: DtypeRecorder | None,  # of the step whose memory is read
        trace: StepTrace | None = None,
    ):
        self._world, self._trace, self._dtypes = world, trace, dtypes
        self.record = StepRecord(
            step=index,
            warmup=warmup,
            samples_seen=(index + 1) * config.data.global_batch_size,
            loss=nan,
            grad_norm=nan,
            lr=nan,
            num_tokens=0,
            step_seconds=nan,
            phase_seconds={},
            memory_bytes=None if dtypes is None else {},
            peak_bytes=None,
            allocated_bytes=None,
            traffic=Traffic(),
        )
        self.sums = torch.zeros(2, device=world.device)  # one message sums both over ranks
        self.loss, self.wishes = self.sums.unbind()
        self.num_wishes = 0.0  # number of ranks that were asked to stop
        self.grad_norm = self.loss
        self._allocations = AllocationMeter(world.timed_device)
        read_between_steps(self.record, self._allocations.peak_bytes)  # it has counted nothing yet
        # A trace is of the host's time, on a GPU too.
        self.clock = StepClock(world.timed_device if trace is None else torch.device("cpu"))
        progress.note_phase(index, progress.DATA)

    def enter(self, phase: str) -> None:
        """Enter a phase that the clock knows too."""
        self.clock.enter(phase)
        progress.note_phase(self.record.step, phase)

    def read_memory(self, moment: str, strategy: Strategy) -> None:
        """Read the bytes held now, if this is the step that [Note: reading memory] names.

        A trace asks after backward alone, where the engine is about to wait for its reductions anyway.
        """
        traces = self._trace is not None and moment == "after_backward"
        memory = self.record.memory_bytes
        if memory is None and not traces:
            return
        phase = self.clock.enter(None)
        states = strategy.model_states()
        if memory is not None:
            memory[moment] = bytes_by_kind(states)
        if self._dtypes is not None:
            self._dtypes.note_states(states)
        if self._trace is not None:
            self._trace.note_model_states(states)
        self.clock.enter(phase)

    def end(self, num_tokens: int, moves: list[TimedMove]) -> None:
        record, self._moves = self.record, moves
        if self._dtypes is not None:
            self._dtypes.note("norm", self.grad_norm)
        record.num_tokens = num_tokens
        record.peak_bytes = self._allocations.peak_bytes()
        record.allocated_bytes = self._allocations.total_allocated_bytes()
        record.host_peak_bytes = self._allocations.host_peak_bytes()
        if record.peak_bytes is not None:
            record.peak_bytes += held_shared_bytes()
        record.traffic = take_traffic()
        if self._trace is not None:
            self._trace.finish(self.clock.marks, moves, held_shared_bytes())
            record.peak = self._trace.peak(record.step)
        self._read_sums = self._world.read_later(self.sums)
        self._read_norm = self._world.read_later(self.grad_norm.view(1))

    def read(self) -> StepRecord:
        """Return the step's record; this waits for the device to finish the step."""
        record = self.record
        record.step_seconds, record.phase_seconds = self.clock.read()
        record.verbs, record.waited_seconds = sum_up_moves(self._moves)
        record.loss, self.num_wishes = self._read_sums()
        (record.grad_norm,) = self._read_norm()
        return record
