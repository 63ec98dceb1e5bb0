"""The direct transport of a CPU rank whose peers do not exist: some share its host, the others are far away.

Buckets, reductions in flight, messages and the lives of gradients are those of the real transport, which is
inherited. Messages go to a process group that moves nothing. Only the memory that ranks share is different, since a
rehearsal has no memory that could be mapped:

    parameters at rest    tensors of their own
    slots                 one tensor as large as the rest of the arena
    a neighbour's slot    a tensor that does not count
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeroexp.comm.collectives import TRANSPORTS
from zeroexp.comm.direct import Direct
from zeroexp.comm.facts import TRANSPORTS as FACTS
from zeroexp.comm.facts import Facts
from zeroexp.comm.messages import Arrival
from zeroexp.comm.shared_memory import SharedChannel
from zeroexp.comm.sizes import arena_bytes, num_slots
from zeroexp.plan.storages import Storages
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World

SLOTS = "shared slots"


@contextmanager
def absent_neighbours(storages: Storages, ranks_per_host: int) -> Generator[None]:
    """Let engines that are built inside choose this transport if they are free to choose."""
    chosen = TRANSPORTS["auto"]
    TRANSPORTS["auto"] = lambda world, moves: DirectWithoutNeighbours(
        world, moves, storages, ranks_per_host
    )
    try:
        yield
    finally:
        TRANSPORTS["auto"] = chosen


class DirectWithoutNeighbours(Direct):
    """The transport of one rank; nothing moves. The ranks of a host follow one another."""

    def __init__(self, world: World, moves: Moves, storages: Storages, ranks_per_host: int) -> None:
        first = world.rank - world.rank % ranks_per_host
        self._host = range(first, min(first + ranks_per_host, world.size))
        super().__init__(world, moves, share_memory=True)
        self._storages = storages
        self._slots: Tensor | None = None

    def connect(self) -> None:
        channel = AbsentNeighbour(self._storages)
        self._channels |= dict.fromkeys((p for p in self._peers if p in self._host), channel)

    def _find_facts(self) -> Facts:
        messages = "mixed" if len(self._host) > 1 else "gloo"
        name = "direct" if len(self._host) == len(self._ranks) else messages
        return FACTS[name]

    def reserve(self, resting: Sequence[int], slot_bytes: int) -> None:
        if len(self._host) > 1:
            beside = arena_bytes(resting, slot_bytes, num_slots(self._facts.name)) - sum(resting)
            self._slots = torch.empty(beside, dtype=torch.uint8, device=self._world.device)
            self._storages.assign_kind(SLOTS, [self._slots])


class AbsentNeighbour(SharedChannel):
    """The channel to a neighbour that does not exist: what it sends lies in its own slots, which are not ours."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages

    def send(self, tag: int, tensors: Sequence[Tensor], what: str) -> list[Any]:
        return []

    def receive(self, tag: int, like: Sequence[Tensor], what: str, *, into: bool) -> Arrival:
        if into:
            return Arrival(lambda: list(like), lambda: None)
        with self._storages.not_counting():
            terms = [torch.empty_like(tensor) for tensor in like]
        return Arrival(lambda: terms, lambda: None)

    def copy_offered(self, offer: int, targets: Sequence[Tensor], what: str) -> None:
        pass
