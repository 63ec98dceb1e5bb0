"""The direct transport of a CPU rank whose peers do not exist: some share its host, the others are far away.

Buckets, reductions in flight, pools, messages and the lives of gradients are those of the real transport, which is
inherited. Messages go to a process group that moves nothing. Only the memory that ranks share is different, since a
rehearsal has no memory that could be mapped:

    parameters at rest    tensors of their own
    slots, pages          one tensor as large as the rest of the arena
    a pool                one tensor as large as the file behind it; the addresses at which units map it do not count
    a neighbour's slot    a tensor that does not count
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zeroexp.comm.base import GatherMemory, GatherPart, Pieces
from zeroexp.comm.collectives import TRANSPORTS
from zeroexp.comm.direct import Direct
from zeroexp.comm.facts import TRANSPORTS as FACTS
from zeroexp.comm.facts import Facts
from zeroexp.comm.messages import Arrival
from zeroexp.comm.paging import lies_on_pages, pages
from zeroexp.comm.shared_memory import SharedChannel
from zeroexp.comm.sizes import arena_bytes, mapped_bytes, num_slots
from zeroexp.plan.storages import Storages
from zeroexp.process.world import World

SLOTS = "shared slots"


@contextmanager
def absent_neighbours(storages: Storages, ranks_per_host: int) -> Generator[None]:
    """Let engines that are built inside choose this transport if they are free to choose."""
    chosen = TRANSPORTS["auto"]
    TRANSPORTS["auto"] = lambda world: DirectWithoutNeighbours(world, storages, ranks_per_host)
    try:
        yield
    finally:
        TRANSPORTS["auto"] = chosen


class DirectWithoutNeighbours(Direct):
    """The transport of one rank; nothing moves. The ranks of a host follow one another."""

    def __init__(self, world: World, storages: Storages, ranks_per_host: int) -> None:
        first = world.rank - world.rank % ranks_per_host
        self._host = range(first, min(first + ranks_per_host, world.size))
        super().__init__(world, share_memory=True)
        self._storages = storages
        self._slots: Tensor | None = None

    def connect(self) -> None:
        channel = AbsentNeighbour(self._storages)
        self._channels |= dict.fromkeys((p for p in self._peers if p in self._host), channel)

    def _find_facts(self, page_bytes: int) -> Facts:
        messages = "mixed" if len(self._host) > 1 else "gloo"
        name = "direct" if len(self._host) == len(self._ranks) else messages
        return replace(FACTS[name], page_bytes=page_bytes)

    def reserve(self, resting: Sequence[int], slot_bytes: int) -> None:
        if len(self._host) > 1:
            size = arena_bytes(
                resting, slot_bytes, num_slots(self._facts.name), self._facts.page_bytes
            )
            beside = size - sum(resting)
            self._slots = torch.empty(beside, dtype=torch.uint8, device=self._world.device)
            self._storages.assign_kind(SLOTS, [self._slots])

    def gather_memory(self, units: Sequence[Pieces], device: torch.device) -> GatherMemory:
        if self._slots is None:
            return super().gather_memory(units, device)
        return NeverMapped(units, self._rank, self._facts.page_bytes, self._storages)


class NeverMapped:
    """A pool as large as its file. Units lie in memory that does not count, as they do in a real pool's addresses."""

    def __init__(
        self, units: Sequence[Pieces], rank: int, page_bytes: int, storages: Storages
    ) -> None:
        self._rank, self._page_bytes, self._storages = rank, page_bytes, storages
        self.memory = torch.empty(max(map(self._file_bytes, units), default=0), dtype=torch.uint8)

    def lay(self, unit: Pieces) -> list[GatherPart]:
        parts: list[GatherPart] = []
        for chunk, piece in unit:
            with self._storages.not_counting():
                mapped = torch.empty(
                    pages(chunk.padded_numel * piece.itemsize, self._page_bytes), dtype=torch.uint8
                )
            full = mapped[: chunk.padded_numel * piece.itemsize].view(piece.dtype)
            in_place = lies_on_pages(chunk, self._rank, piece.itemsize, self._page_bytes)
            parts.append(GatherPart(chunk, full, piece, in_place=in_place))
        return parts

    def _file_bytes(self, unit: Pieces) -> int:
        return sum(
            mapped_bytes([chunk], self._rank, piece.itemsize, self._page_bytes)
            for chunk, piece in unit
        )


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
