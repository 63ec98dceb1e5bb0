"""The processes of one engine: ranks that wait on a pipe, take a turn when woken, and answer what it cost."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.engines import SEQ_LEN, Timed, build_engine, model_config
from benchmarks.links import Link
from zeroexp.cluster.emulated_network import enter
from zeroexp.comm.collectives import held_shared_bytes, take_traffic
from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.measure.tcp_bytes import wire_meter
from zeroexp.models.loss import loss_sum
from zeroexp.process import world as worlds
from zeroexp.process.world import World
from zeroexp.run.rank import keep_freed_memory

START_SECONDS = 300  # to import, build and join
TURN_SECONDS = 600
# Forked once for all ranks, after the imports and before any thread: a rank then starts in milliseconds.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.ranks", "transformers.models.llama"])


class RankFailed(RuntimeError):
    """A rank of the engine raised, died, or did not answer in time."""


@dataclass(frozen=True)
class Spec:
    engine: str
    model: str
    precision: str
    world_size: int
    clip: bool = False


@dataclass(frozen=True)
class Turn:
    """What one turn of one rank cost; bytes are per step, but for the peak."""

    step_seconds: float
    cpu_seconds: float  # of a step, all threads: what is missing to step_seconds is waiting
    peak_bytes: int | None
    allocated_bytes: int | None
    wire_bytes: int | None
    form_bytes: int | None  # what our collectives counted; None where the engine does not count


class Runner(Protocol):
    """What waits on the rank's end of the pipe."""

    def turn(self, order: Any) -> Any: ...


class Ranks:
    """The parent's handle: one process per rank, alive until `stop`; `make` gives each its runner there."""

    def __init__(
        self, spec: Spec, link: Link, make: Callable[[Spec], Runner] | None = None
    ) -> None:
        self.spec = spec
        self._folder = tempfile.TemporaryDirectory(prefix="zeroexp-bench-")
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(spec.world_size):
            ours, theirs = CONTEXT.Pipe()
            namespace = link.namespace_of(rank, spec.world_size)
            place = RankNetwork(rank, rendezvous, namespace, link.interface)
            arguments = (make or StepRunner, spec, place, theirs)
            process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_until_ready(self) -> None:
        self._answers(START_SECONDS)

    def turn(self, order: Any) -> list[Any]:
        """What each rank's runner answers, by rank."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(order)
            except ConnectionError as error:
                raise RankFailed(f"{self.spec}: rank {rank} is gone") from error
        return self._answers(TURN_SECONDS)

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def _answers(self, seconds: float) -> list:
        deadline = time.monotonic() + seconds
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RankFailed(f"{self.spec}: rank {rank} did not answer in {seconds:.0f} s")
            try:
                answer = pipe.recv()
            except (EOFError, ConnectionError) as error:
                raise RankFailed(f"{self.spec}: rank {rank} died without a word") from error
            if isinstance(answer, str):
                raise RankFailed(f"{self.spec}: rank {rank} raised\n{answer}")
            answers.append(answer)
        return answers


@dataclass(frozen=True)
class RankNetwork:
    """Where a rank runs and how it meets the others."""

    rank: int
    rendezvous: str
    namespace: str | None  # the file of the network's; None: the machine's own
    interface: str


def _serve(
    make: Callable[[Spec], Runner], spec: Spec, place: RankNetwork, pipe: Connection
) -> None:
    """What a rank process does: build, say so, then answer each order with what its turn cost."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # engines that log to stdout
    try:
        if place.namespace is not None:
            with open(place.namespace, encoding="utf-8") as namespace:
                enter(namespace.fileno())
        os.environ.update(
            RANK=str(place.rank),
            LOCAL_RANK=str(place.rank),
            WORLD_SIZE=str(spec.world_size),
            ZEROEXP_RENDEZVOUS=place.rendezvous,
            GLOO_SOCKET_IFNAME=place.interface,
        )
        torch.set_num_threads(1)
        keep_freed_memory()
        count_cpu_allocations()
        runner = make(spec)
        pipe.send(None)
        with contextlib.suppress(EOFError):  # the parent closed the pipe: the end
            while True:
                pipe.send(runner.turn(pipe.recv()))
    except Exception:
        pipe.send(traceback.format_exc())


class Training:
    """The engine of a spec on this rank, and a batch that it is trained on again and again."""

    def __init__(
        self, spec: Spec, world: World | None = None, build: Callable[..., Timed] = build_engine
    ) -> None:
        """`world`: one that has been joined."""
        self.world = world or worlds.join_process_group(timeout_seconds=TURN_SECONDS)
        self.strategy = build(
            spec.engine,
            model_config(spec.model),
            precision=spec.precision,
            world=self.world,
            clip=spec.clip,
        )
        self._tokens = tokens_of(spec.model, self.world.rank)
        self._num_valid = SEQ_LEN * self.world.size

    def step(self, *, drain: bool = False) -> Tensor:
        with self.strategy.microbatch(last=True):
            self.strategy.backward(self._loss())
        norm = self.strategy.step(drain=drain)
        self.strategy.zero_grad()
        return norm

    def _loss(self) -> Tensor:
        """A function of its own, so that the model's output dies before backward."""
        output = self.strategy.model(input_ids=self._tokens[:, :-1])
        return loss_sum(output, self._tokens[:, 1:], "causal") / self._num_valid


def tokens_of(model: str, rank: int) -> Tensor:
    """The sample of a rank, [1, SEQ_LEN + 1] int64."""
    words = model_config(model).hf_config["vocab_size"]
    return torch.randint(words, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(rank))


class StepRunner:
    """A turn is a number of steps."""

    def __init__(self, spec: Spec, build: Callable[..., Timed] = build_engine) -> None:
        self._training = Training(spec, build=build)
        self._world, self._strategy = self._training.world, self._training.strategy

    def turn(self, order: int) -> Turn:
        """[Note: a turn] of the package: drained and barriered at both ends."""
        gc.collect()
        gc.disable()  # a collection in somebody's turn would be his bad luck
        worlds.barrier()
        take_traffic()
        memory, wire = AllocationMeter(self._world.device), wire_meter(self._world.backend)
        start, cpu_start = time.perf_counter(), time.process_time()
        for number in range(1, order + 1):
            self._training.step(drain=number == order)
        worlds.barrier()
        seconds = time.perf_counter() - start
        cpu_seconds = time.process_time() - cpu_start
        gc.enable()
        return Turn(
            step_seconds=seconds / order,
            cpu_seconds=cpu_seconds / order,
            peak_bytes=_plus(memory.peak_bytes(), held_shared_bytes()),
            allocated_bytes=_per(order, memory.total_allocated_bytes()),
            wire_bytes=_per(order, wire.take_bytes()),
            form_bytes=_per(order, sum(take_traffic().bytes_by_kind.values())),
        )


def _plus(num_bytes: int | None, outside_of_torch: int) -> int | None:
    return None if num_bytes is None else num_bytes + outside_of_torch


def _per(num_steps: int, num_bytes: int | None) -> int | None:
    return None if num_bytes is None else round(num_bytes / num_steps)
