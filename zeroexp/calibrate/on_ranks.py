"""Run a function on ranks of this machine, on CPUs or one on each GPU, which meet as those of a run do."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zeroexp.process import locks
from zeroexp.process import world as worlds
from zeroexp.process.world import World
from zeroexp.run.rank import keep_freed_memory

Found = TypeVar("Found")

NUM_RANKS = 2  # on CPUs


def on_ranks(
    task: Callable[[World], Found], device: str = "cpu", num_ranks: int = NUM_RANKS
) -> Found:
    """Return what `task` returns on rank 0. Raises RuntimeError if a rank ends with an error."""
    context = multiprocessing.get_context("fork")
    with locks.temporary_folder() as folder:
        results = context.SimpleQueue()
        ranks = [
            context.Process(
                target=_rank, args=(place, device, f"file://{folder}/meet", task, results)
            )
            for place in (worlds.RankInfo(index, num_ranks, index) for index in range(num_ranks))
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            raise RuntimeError("a rank of the calibration ended with an error, see above")
        return results.get()


def _rank(
    place: worlds.RankInfo,
    device: str,
    rendezvous: str,
    task: Callable[[World], Any],
    results: Any,
) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ.update(worlds.environment_of_rank(place))
    os.environ["ZEROEXP_RENDEZVOUS"] = rendezvous
    with worlds.joined_process_group(device=device) as world:
        result = task(world)
        if place.rank == 0:
            results.put(result)
