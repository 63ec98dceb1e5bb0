"""Run a loop on ranks of this machine, over gloo on CPUs, and judge in one process what they saw."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # here, so that ranks, which are forks, need not import it
import torch.distributed.optim

from zeroexp.process import locks
from zeroexp.process import world as worlds
from zeroexp.verify.compare_steps import Verdict, judge
from zeroexp.verify.local_elements import Places
from zeroexp.verify.loop_to_verify import NoLoop, Source, batch_of, make_loop
from zeroexp.verify.observe import Observer, listen_to_clipping

PEERS_SECONDS = 3.0  # in which peers of a failed rank may say why they fail


def verify_world(source: Source, size: int, num_steps: int, seconds: float) -> Verdict:
    """Return how the loop on `size` ranks compares with one process. Raises NoLoop if it can not be run."""
    torch.set_num_threads(1)  # else forks would wait for threads that they lack
    torch.optim.SGD([torch.zeros(1)])  # has torch import its compiler here, and not in each fork
    with locks.temporary_folder() as folder:
        _run(_rank, size, folder, (source, num_steps), seconds)
        _run(_judge, 1, folder, (source, size), seconds)
        return torch.load(folder / "verdict", weights_only=False)


def _run(
    work: Callable[..., None], size: int, folder: Path, words: tuple[Any, ...], seconds: float
) -> None:
    """Wait until all ranks have worked. Raises NoLoop with the first error, or if they are not done in time."""
    context = multiprocessing.get_context("fork")
    places = [worlds.RankInfo(rank, size, rank) for rank in range(size)]
    ranks = [
        context.Process(target=_begin, args=(work, each, folder, words), daemon=True)
        for each in places
    ]
    for each in ranks:
        each.start()
    end = time.monotonic() + seconds
    while (
        waited := [rank for rank in range(size) if ranks[rank].is_alive()]
    ) and time.monotonic() < end:
        if any(each.exitcode for each in ranks):
            end = min(end, time.monotonic() + PEERS_SECONDS)
        time.sleep(0.01)
    codes = [each.exitcode for each in ranks]
    for each in ranks:
        each.kill()
        each.join()
    _refuse_failed(folder, waited, codes, seconds)


def _refuse_failed(
    folder: Path, waited: list[int], codes: Sequence[int | None], seconds: float
) -> None:
    if errors := sorted(folder.glob("error.*"), key=lambda path: path.stat().st_mtime_ns):
        raise NoLoop(errors[0].read_text(encoding="utf-8"))
    for rank, code in enumerate(codes):
        if code:
            raise NoLoop(f"rank {rank} of {len(codes)}: ended with exit code {code}")
    if waited:
        raise NoLoop(
            f"rank {', '.join(map(str, waited))} of {len(codes)}: not done after {seconds:g} s; see whether "
            "ranks issue different collectives, or give more --seconds"
        )


def _begin(
    work: Callable[..., None], place: worlds.RankInfo, folder: Path, words: tuple[Any, ...]
) -> None:
    """Be one rank: join the others, work, and leave one line if that fails."""
    torch.set_num_threads(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # else ranks write over the answer
        os.dup2(nowhere, output)
    meeting = f"file://{folder}/{work.__name__}"
    os.environ.update(worlds.environment_of_rank(place), ZEROEXP_RENDEZVOUS=meeting)
    listen_to_clipping()
    try:
        with worlds.joined_process_group() as world:
            leave = dist.destroy_process_group
            # A loop's own calls find the group made, and leave it to be left here.
            dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
            work(world, folder, *words)
            dist.destroy_process_group = leave
    except (Exception, SystemExit) as error:
        who = "the plain process" if work is _judge else f"rank {place.rank} of {place.size}"
        line = (
            str(error) if isinstance(error, NoLoop) else f"{who}: {_one_line(error, words[0].file)}"
        )
        (folder / f"error.{place.rank}").write_text(line, encoding="utf-8")
        os._exit(1)  # leaving the group would wait for peers


def _one_line(error: BaseException, file: Path | None) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == file] or frames
    what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: {what}"


def _rank(world: worlds.World, folder: Path, source: Source, num_steps: int) -> None:
    loop = make_loop(source)
    initial = {name: each.detach().clone() for name, each in loop.model.named_parameters()}
    made = loop.train(loop.model)
    holder, step = made if isinstance(made, tuple) and len(made) == 2 else (loop.model, made)
    if not callable(step):
        raise NoLoop(f"{source.name}: train returns no step; return step, or (model, step)")
    observer = Observer(Places(holder, initial))
    for index in range(num_steps):
        batches = [batch_of(loop, index, world.rank, each) for each in range(loop.microbatches)]
        with observer.step():
            step(batches)
    torch.save(observer.record, folder / f"record.{world.rank}")
    worlds.barrier()


def _judge(_: worlds.World, folder: Path, source: Source, size: int) -> None:
    files = [folder / f"record.{rank}" for rank in range(size)]
    records = [torch.load(each, weights_only=False) for each in files]
    torch.save(judge(make_loop(source), records), folder / "verdict")
