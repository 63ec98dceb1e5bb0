"""Run a loop on ranks of this machine, over gloo on CPUs, and judge in one process what they saw."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # here, so that ranks, which are forks, need not import it
import torch.distributed.optim

from zeroexp.process.on_ranks import RankFailed, on_ranks
from zeroexp.process.world import World
from zeroexp.verify.compare_steps import Verdict, judge
from zeroexp.verify.equal_ranks import REFUSED, REMEDY, stand_for_ranks
from zeroexp.verify.local_elements import Places
from zeroexp.verify.loop_to_verify import NoLoop, Source, batch_of, drawn_by, make_loop
from zeroexp.verify.observe import LoopRecorder, Record, listen_to_clipping
from zeroexp.verify.rounding_oracle import first_norm

Found = TypeVar("Found")


def prepare_for_forks() -> None:
    """Set up in this process what each of its forks would lack, or make again."""
    torch.set_num_threads(1)  # else forks would wait for threads that they lack
    torch.optim.SGD([torch.zeros(1)])  # has torch import its compiler here, and not in each fork


def verify_world(source: Source, size: int, num_steps: int, seconds: float) -> Verdict:
    """Return how the loop on `size` ranks compares with one process. Raises NoLoop if it can not be run."""
    prepare_for_forks()

    def on_forks(task: Callable[[World], Found], num_ranks: int, plain: int = 0) -> list[Found]:
        """plain: for how many ranks a plain process stands."""

        def describe(error: BaseException, rank: int) -> str:
            who = "the plain process" if plain else f"rank {rank} of {num_ranks}"
            line = _one_line(error, source.file)
            return str(error) if isinstance(error, NoLoop) else f"{who}: {line}"

        def quietly(world: World) -> Found:
            if plain > 1:
                stand_for_ranks(plain)
            with silenced():
                return task(world)

        return on_ranks(quietly, num_ranks, seconds=seconds, describe=describe)

    of_one = [0.0]
    try:
        records = on_forks(lambda world: record_of(world, source, num_steps), size)
        with suppress(RankFailed):  # a loop may need several ranks
            of_one = on_forks(lambda _: first_norm(make_loop(source)), 1, plain=1)
        (verdict,) = on_forks(lambda _: judge(make_loop(source), records, *of_one), 1, plain=size)
    except RankFailed as problem:
        raise NoLoop(str(problem)) from None
    return verdict


@contextmanager
def silenced() -> Generator[None]:
    """Show nothing of what a loop prints, and have its own calls find the process group made, as on one machine."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # else ranks write over the answer
        os.dup2(nowhere, output)
    listen_to_clipping()
    leave = dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    yield
    dist.destroy_process_group = leave


def _one_line(error: BaseException, file: Path | None) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == file] or frames
    what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    what = REMEDY if REFUSED in what else what
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: {what}"


def record_of(world: World, source: Source, num_steps: int) -> Record:
    """Run the loop's steps on this rank and return what it saw of them."""
    loop = make_loop(source)
    drawn = drawn_by(loop, world.rank, num_steps)
    initial = {name: each.detach().clone() for name, each in loop.model.named_parameters()}
    made = loop.train(loop.model)
    holder, step = made if isinstance(made, tuple) and len(made) == 2 else (loop.model, made)
    if not callable(step):
        raise NoLoop(
            f"{source.name}: train returns no step; return step, or (model or strategy, step)"
        )
    recorder = LoopRecorder(Places(holder, initial))
    recorder.record.drawn = drawn
    for index in range(num_steps):
        batches = [batch_of(loop, index, world.rank, each) for each in range(loop.microbatches)]
        with recorder.recording_step():
            returned = step(batches)
        if loop.returns_norm:
            recorder.record.steps[-1].norm = _norm_in(returned)
    return recorder.record


def _norm_in(returned: object) -> float:
    try:
        return float(returned)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RuntimeError):
        problem = f"step returns a {type(returned).__name__}"
        remedy = "return the norm of all gradients, or leave returns_norm out"
        raise NoLoop(f"Loop(returns_norm=True): {problem}; {remedy}") from None
