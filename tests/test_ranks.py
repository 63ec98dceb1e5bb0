"""The pool of ranks itself: it must never turn a failure into a success, or a hang into a longer one."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError
from zeroexp.process.world import World


def who(world: World, word: str) -> tuple[str, int, int, int]:
    return word, world.rank, world.size, os.getpid()


def summed(world: World, first: torch.Tensor) -> torch.Tensor:
    tensor = first + world.rank
    dist.all_reduce(tensor)
    return tensor


def fail_on(world: World, rank: int) -> None:
    if world.rank == rank:
        raise KeyError("lost")
    dist.barrier()


def die_on(world: World, rank: int) -> None:
    if world.rank == rank:
        os._exit(7)
    dist.barrier()


def warn(world: World) -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_every_rank_answers_and_stays_warm(ranks):
    first = ranks(who, "a", world_size=3)
    second = ranks(who, "b", world_size=3)
    assert [answer[:3] for answer in first] == [("a", rank, 3) for rank in range(3)]
    assert [answer[3] for answer in first] == [answer[3] for answer in second]


def test_tensors_travel_and_ranks_communicate(ranks):
    assert [t.tolist() for t in ranks(summed, torch.ones(2))] == [[3.0, 3.0]] * 2


def test_the_first_failure_is_told_at_once_and_the_world_is_new(ranks):
    _, before = (a[3] for a in ranks(who, ""))
    with pytest.raises(RankError, match=r"^rank 1: (.|\n)*KeyError: 'lost'") as caught:
        ranks(fail_on, 1)
    assert "rank 0" not in str(caught.value), "nobody waited until its barrier gave up"
    assert ranks(who, "")[1][3] != before


def test_a_dead_rank_is_told(ranks):
    with pytest.raises(RankError, match="rank 0: died with exit code 7"):
        ranks(die_on, 0)


def test_warnings_are_errors_on_ranks(ranks):
    with pytest.raises(RankError, match="UserWarning: careful"):
        ranks(warn)
