"""Ranks that issue different collectives are told apart; a rank that is only slow is accused of nothing.

What ranks ask one store for while they are idle does not grow with their number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroexp.process.watchdog import differs
from zeroexp.process.watchdog.differs import ComparingThread, Moves, describe_difference
from zeroexp.process.world import World, join_process_group

LOOKS = 0.05  # seconds of a look and of patience here


def test_the_first_number_with_different_words_is_told() -> None:
    mine = [(3, "the gather of a"), (4, "the gather of b"), (5, "the reduce of b")]
    theirs = [(4, "the gather of b"), (5, "the norm"), (6, "the gather of a")]
    text = describe_difference(theirs, mine, 1)
    assert text is not None
    assert "rank 0 is in the norm; rank 1 is in the reduce of b" in text


@pytest.mark.parametrize("theirs", [[], [(1, "a")], [(2, "b"), (3, "c")], [(4, "a"), (5, "b")]])
def test_who_is_behind_or_ahead_is_not_accused(theirs) -> None:
    assert describe_difference([(1, "a"), (2, "b"), (3, "c")], theirs, 1) is None


class Counted:
    """A store of torch's that counts what it is asked for, by rank."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.num_requests: Counter[int] = Counter()

    def of(self, rank: int) -> Any:
        return CountedStore(self, rank)

    def asked(self, rank: int, name: str) -> Any:
        self.num_requests[rank] += 1
        return getattr(self._store, name)

    def take_most(self) -> int:
        """Return the requests of the rank that asked most since the last call."""
        most, self.num_requests = max(self.num_requests.values()), Counter()
        return most


class Group:
    """A process group of which a thread wants the store alone."""

    def __init__(self, store: Any) -> None:
        self.get_group_store = lambda: store


class CountedStore:
    """The store as one rank asks it."""

    def __init__(self, counted: Counted, rank: int) -> None:
        self._counted, self._rank = counted, rank

    def __getattr__(self, name: str) -> Any:
        return self._counted.asked(self._rank, name)


NUM_LOOKS = 5


class Ranks:
    """Ranks that look by turns, and what each of them does."""

    def __init__(self, size: int) -> None:
        self.store = Counted()
        cpu = torch.device("cpu")
        self.moves = [Moves(World(rank, size, cpu, "gloo")) for rank in range(size)]
        groups: list[Any] = [Group(self.store.of(rank)) for rank in range(size)]
        self._threads = list(map(ComparingThread, self.moves, ["engine"] * size, groups))
        self.store.take_most()

    def look(self) -> set[str | None]:
        """What the ranks tell at one look of each."""
        looks = zip(self._threads, self.moves, strict=True)
        return {
            thread.look(moves, self.store.of(rank)) for rank, (thread, moves) in enumerate(looks)
        }


@pytest.mark.parametrize("size", [2, 8, 200])
def test_idle_ranks_ask_the_store_for_as_much_however_many_they_are(size: int) -> None:
    ranks = Ranks(size)
    for moves in ranks.moves:
        moves.record_collective("the gather of a")
    assert ranks.look() == {None}
    assert ranks.store.take_most() == 3
    for _ in range(NUM_LOOKS):
        assert ranks.look() == {None}
        assert ranks.store.num_requests == {0: 1} | dict.fromkeys(range(1, size), 2)
        ranks.store.take_most()
    # One rank goes another way: all are told once it has looked.
    odd = size // 3
    for rank, moves in enumerate(ranks.moves):
        moves.record_collective("the norm" if rank == odd else "the gather of b")
    told = [ranks.look() for _ in range(2)]
    assert ranks.store.take_most() <= 5 * len(told)
    (text,) = told[-1]
    assert text is not None and f"rank {odd} is in the norm" in text
    assert f"rank {int(odd == 0)} is in the gather of b" in text


def test_a_wait_for_a_gpu_ends_in_whichever_group_it_is(monkeypatch) -> None:
    """A communicator of replicas, or of reductions, goes on when that of all ranks is aborted."""
    monkeypatch.setattr(differs, "LOOK_SECONDS", 0.0)
    world = join_process_group()
    lanes = [world.with_communicator(lane) for lane in ("reductions", "more")]
    for lane in lanes:
        lane.join()
    groups = [dist.group.WORLD, *(lane.process_group for lane in lanes)]
    aborted: list[Any] = []
    monkeypatch.setattr(dist.ProcessGroup, "abort", lambda group: aborted.append(group))
    moves = Moves(replace(world, backend="nccl"))
    thread = ComparingThread(moves, "engine", groups[0])
    thread._end_waits(moves, "the ranks differ", groups[0])
    assert moves.error == "the ranks differ" and set(aborted) == set(groups)
