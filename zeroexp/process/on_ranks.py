"""Run a function on ranks of this machine: forks of this process, which meet as the ranks of a run do."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeroexp.process import locks, signals
from zeroexp.process import world as worlds

Found = TypeVar("Found")
PEERS_SECONDS = 3.0  # in which peers of a failed rank may say why they fail


class RankFailed(RuntimeError):
    """Why a rank returned nothing."""


def on_ranks(
    task: Callable[[worlds.World], Found],
    num_ranks: int,
    *,
    device: str = "cpu",
    seconds: float = float("inf"),
    describe: Callable[[BaseException, int], str] = lambda *_: traceback.format_exc(),
) -> list[Found]:
    """Return what `task` returns on each rank. Raises RankFailed.

    describe: what is told of a rank's first error.
    """
    context = multiprocessing.get_context("fork")
    with locks.temporary_folder() as folder, ExitStack() as at_end:
        words = os.getpid(), device, folder, task, describe
        places = [worlds.RankInfo(rank, num_ranks, rank) for rank in range(num_ranks)]
        ranks = [context.Process(target=_rank, args=(each, *words)) for each in places]
        for each in ranks:
            each.start()
            at_end.callback(_end, each)
        end = time.monotonic() + seconds
        while any(each.is_alive() for each in ranks) and time.monotonic() < end:
            if any(each.exitcode for each in ranks):
                end = min(end, time.monotonic() + PEERS_SECONDS)
            time.sleep(0.01)
        _refuse_failed(folder, [each.exitcode for each in ranks], seconds)
        files = [folder / f"found.{rank}" for rank in range(num_ranks)]
        return [torch.load(file, weights_only=False) for file in files]


def _end(rank: BaseProcess) -> None:
    rank.kill()
    rank.join()


def _refuse_failed(folder: Path, codes: list[int | None], seconds: float) -> None:
    if errors := sorted(folder.glob("error.*"), key=lambda path: path.stat().st_mtime_ns):
        raise RankFailed(errors[0].read_text(encoding="utf-8"))
    for rank, code in enumerate(codes):
        if code:
            raise RankFailed(f"rank {rank} of {len(codes)}: ended with exit code {code}")
    if waited := [str(rank) for rank, code in enumerate(codes) if code is None]:
        raise RankFailed(
            f"rank {', '.join(waited)} of {len(codes)}: not done after {seconds:g} s; see whether "
            "ranks issue different collectives, or give more --seconds"
        )


def _rank(
    place: worlds.RankInfo,
    parent: int,
    device: str,
    folder: Path,
    task: Callable[[worlds.World], Any],
    describe: Callable[[BaseException, int], str],
) -> None:
    signals.end_with_parent(parent)
    torch.set_num_threads(1)
    os.environ.update(
        worlds.environment_of_rank(place), ZEROEXP_RENDEZVOUS=f"file://{folder}/meeting"
    )
    try:
        with worlds.joined_process_group(device=device) as world:
            torch.save(task(world), folder / f"found.{place.rank}")
            worlds.barrier()  # none leaves while a peer still moves
    except (Exception, SystemExit) as error:
        said = describe(error, place.rank)
        (folder / f"error.{place.rank}").write_text(said, encoding="utf-8")
        os._exit(1)  # leaving the group would wait for peers
