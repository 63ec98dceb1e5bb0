"""Ranks that issue different collectives are told apart; a rank that is only slow is accused of nothing.

What ranks ask one store for while they are idle does not grow with their number.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroexp.comm import journal
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.journal import ComparingThread, Journal, describe_difference
from zeroexp.comm.missing_messages import LateMessageThread, Message, Watch
from zeroexp.process.world import World

LOOKS = 0.05  # seconds of a look and of patience here
SHOWN_AND_READ_SECONDS = 8 * LOOKS  # both ranks have looked by then


def test_the_first_number_with_different_words_is_told() -> None:
    mine = {3: "the gather of a", 4: "the gather of b", 5: "the reduce of b"}
    text = describe_difference(
        1, mine, 0, {4: "the gather of b", 5: "the norm", 6: "the gather of a"}
    )
    assert text is not None
    assert "rank 0 is in the norm; rank 1 is in the reduce of b" in text


@pytest.mark.parametrize("theirs", [{}, {1: "a"}, {2: "b", 3: "c"}, {4: "a", 5: "b"}])
def test_who_is_behind_or_ahead_is_not_accused(theirs) -> None:
    assert describe_difference(0, {1: "a", 2: "b", 3: "c"}, 1, theirs) is None


def sum_with_a_slow_rank(world: World) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOOK_SECONDS", "PATIENCE_SECONDS"):
            patch.setattr(journal, name, LOOKS)
        wire = Collectives(world, transport="native")
        wire.connect()
        sums: list[float] = []
        for seconds in (0.0, SHOWN_AND_READ_SECONDS):
            if world.rank == 1:
                time.sleep(seconds)
            sums.append(float(wire.sum_scalar(torch.ones(1), "norm")))
        return sums


def test_a_slow_rank_is_waited_for(ranks) -> None:
    assert ranks(sum_with_a_slow_rank) == [[2.0, 2.0]] * 2


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


class CountedStore:
    """The store as one rank asks it."""

    def __init__(self, counted: Counted, rank: int) -> None:
        self._counted, self._rank = counted, rank

    def __getattr__(self, name: str) -> Any:
        return self._counted.asked(self._rank, name)


NUM_LOOKS = 5


@pytest.mark.parametrize("size", [2, 8, 200])
def test_idle_ranks_ask_the_store_for_as_much_however_many_they_are(size: int) -> None:
    store = Counted()
    cpu = torch.device("cpu")
    journals = [Journal(World(rank, size, cpu, "gloo")) for rank in range(size)]
    threads = [ComparingThread(weakref.ref(j), j._world, "engine") for j in journals]

    def look() -> set[str | None]:
        pairs = enumerate(zip(threads, journals, strict=True))
        return {thread.look(each, store.of(rank)) for rank, (thread, each) in pairs}

    for each in journals:
        each.record_collective("the gather of a")
    assert look() == {None}
    assert store.take_most() <= 5  # two of them write
    for _ in range(NUM_LOOKS):
        assert look() == {None}
        assert store.take_most() <= 3
    # One rank goes another way: all are told within as many looks as there are distances, and one more.
    odd = size // 3
    for rank, each in enumerate(journals):
        each.record_collective("the norm" if rank == odd else "the gather of b")
    told = [look() for _ in range((size - 1).bit_length() + 1)]
    assert store.take_most() <= 6 * len(told)
    (text,) = told[-1]
    assert text is not None and f"rank {odd} is in the norm" in text


@pytest.mark.parametrize("size", [3, 8, 200])
def test_ranks_that_wait_for_one_ask_the_store_for_as_much_however_many_they_are(size: int) -> None:
    store = Counted()
    watches = [Watch(rank, size, "engine") for rank in range(size)]
    threads = [LateMessageThread(weakref.ref(w), w.rank, size, "engine") for w in watches]

    def look(ranks: range) -> None:
        for rank in ranks:
            watch = watches[rank]
            assert watch.now is not None
            threads[rank].look(watch, *watch.now, store.of(rank))

    for rank in range(1, size):
        watches[rank].now = (Message(0, 7, 4, "the gather of a", given=False), 1.0)
    for _ in range(NUM_LOOKS):
        look(range(1, size))
        assert store.take_most() == 2
    assert {watch.error for watch in watches} == {None}, "rank 0 computes"
    watches[0].now = (Message(1, 9, 4, "the gather of b", given=False), 2.0)
    for _ in range(2):
        look(range(size))
    assert store.take_most() <= 2 * (1 + 2 * 2 + 3)
    for watch in watches:
        assert watch.error is not None and "rank 0 waits for rank 1: the gather of b" in watch.error
