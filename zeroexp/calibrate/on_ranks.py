"""Run a function on ranks of this machine, which meet as those of a run do."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zeroexp import world as worlds
from zeroexp.rank import keep_freed_memory
from zeroexp.world import World

Found = TypeVar("Found")

NUM_RANKS = 2


def on_ranks(task: Callable[[World], Found]) -> Found:
    """Return what `task` returns on rank 0. Raises RuntimeError if a rank ends with an error."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=_rank, args=(index, f"file://{folder}/meet", task, results))
            for index in range(NUM_RANKS)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            raise RuntimeError("a rank of the calibration ended with an error, see above")
        return results.get()


def _rank(index: int, rendezvous: str, task: Callable[[World], Any], results: Any) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ.update(worlds.environment_of_rank(worlds.RankInfo(index, NUM_RANKS, index)))
    os.environ["ZEROEXP_RENDEZVOUS"] = rendezvous
    with worlds.joined_process_group() as world:
        found = task(world)
        if index == 0:
            results.put(found)
