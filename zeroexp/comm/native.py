"""The backend's own collectives (NCCL; in tests gloo and the fake group): one for each move, whatever the layout.

Where all ranks' parts of the message have one size, a move is the even all-gather or reduce-scatter. Else it is the
variant for a list of parts, which NCCL launches as one group. The backend decides the order of sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.comm.base import (
    Between,
    GatherPart,
    Pending,
    ReducePart,
    Sent,
    TimedWork,
)
from zeroexp.comm.facts import TRANSPORTS
from zeroexp.comm.message_layout import MessageLayout, message_layout_of
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World


class Native:
    """Every move is one collective of the backend."""

    staging_bytes = held_shared_bytes = 0
    facts = TRANSPORTS["native"]

    def __init__(self, world: World, moves: Moves):
        self._world = world
        self._rank = world.rank
        self._size = world.size
        # gloo gathers parts of one size only, so smaller parts are padded there.
        self._gathers_uneven = world.backend == "nccl"
        self._is_fake = world.is_fake
        self._moves = moves

    @property
    def issued_checksum(self) -> int:
        return self._moves.checksum

    def connect(self) -> None:
        """Do nothing: the backend finds its peers itself."""

    def reserve(self, resting: Sequence[int], slot_bytes: int) -> None:
        """Do nothing: the backend sends from any memory."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def quiesce(self) -> None:
        """Do nothing: whoever waited for a move knows that the backend has read its tensors."""

    def offer(self, parts: Sequence[GatherPart], renewed: int | None) -> int:
        return 0  # no offer is needed: the backend reads a piece when it is gathered

    def all_gather(self, parts: Sequence[GatherPart], offer: int | None, what: str) -> Sent:
        self._moves.record_collective(what)
        layout = message_layout_of(tuple(part.chunk for part in parts))
        num_bytes = sum(part.piece.nbytes for part in parts) * (self._size - 1)
        if len(parts) == 1:
            return self._gather(layout, parts[0].full, parts[0].piece), num_bytes
        mine = torch.cat([part.piece for part in parts])
        message = mine.new_empty(layout.numel)
        gathered = self._gather(layout, message, mine)
        return Pending([gathered], lambda: layout.unpack_sections(message, parts)), num_bytes

    def reduce_scatter(self, parts: Sequence[ReducePart], what: str) -> Sent:
        self._moves.record_collective(what)
        layout = message_layout_of(tuple(part.chunk for part in parts))
        message = parts[0].gradients[0].new_empty(layout.numel)
        layout.pack_gradients(message, [part.gradients for part in parts])
        own = message.new_empty(layout.numel_by_rank[self._rank])
        work = self._reduce(layout, own, message)

        # `hand_out` must not keep the gradients alive: the message holds copies of them.
        outs = [(part.out, part.accumulate) for part in parts]

        def hand_out() -> None:
            sums = iter(layout.spans_of(self._rank, own))
            added: tuple[list[Tensor], list[Tensor]] = [], []
            copied: tuple[list[Tensor], list[Tensor]] = [], []
            for out, accumulate in outs:
                targets, sources = added if accumulate else copied
                targets.extend(out)
                sources.extend(itertools.islice(sums, len(out)))
            if added[0]:
                torch._foreach_add_(*added)
            if copied[0]:
                torch._foreach_copy_(*copied)

        return self._pending(work, hand_out), message.nbytes - own.nbytes

    def all_reduce(
        self, parts: Sequence[ReducePart], what: str, between: Between | None = None
    ) -> Sent:
        self._moves.record_collective(what)
        gradients = [gradient for part in parts for gradient in part.gradients]
        sizes = [gradient.numel() for gradient in gradients]
        rest = -sum(sizes) % self._size if between is not None else 0
        message = torch.cat([*gradients, gradients[0].new_zeros(rest)])
        num_bytes = 2 * message.nbytes * (self._size - 1) // self._size

        def spread() -> None:
            torch._foreach_copy_(gradients, list(message.split([*sizes, rest]))[:-1])

        if between is None:
            work = dist.all_reduce(message, group=self._group, async_op=True)
            return self._pending(work, spread), num_bytes
        own = message.new_empty(message.numel() // self._size)
        reduced = self._pending(_reduce_scatter(own, message, self._group))
        summed = Pending([reduced], lambda: between([own]))
        gathered = Pending([summed], lambda: self._pending(_all_gather(message, own, self._group)))
        return Pending([gathered], spread), num_bytes

    def sum(self, value: Tensor, what: str) -> Pending:
        self._moves.record_collective(what)
        group = self._moves.world.process_group
        return self._pending(dist.all_reduce(value, group=group, async_op=True))

    def _pending(self, work: Any, then: Callable[[], None] | None = None) -> Pending:
        return Pending([TimedWork(self._moves.watched(work))], then)

    def _gather(self, layout: MessageLayout, message: Tensor, mine: Tensor) -> Pending:
        """Gather the parts of all ranks into `message`; `mine` is this rank's part, which may lie in it."""
        if layout.is_even:
            return self._pending(_all_gather(message, mine, self._group))
        if self._is_fake:
            self._view_of_own_part(layout, message).copy_(mine)
            return self._pending(_all_gather(*_nothing(mine), self._group))
        if self._gathers_uneven:
            parts = list(message.split(layout.numel_by_rank))
            return self._pending(dist.all_gather(parts, mine, group=self._group, async_op=True))
        padded, sent = layout.pad_sections(mine)
        work = _all_gather(padded, sent, self._group)
        return self._pending(work, lambda: layout.unpad_sections(padded, message))

    def _reduce(self, layout: MessageLayout, own: Tensor, message: Tensor) -> Any:
        if layout.is_even:
            return _reduce_scatter(own, message, self._group)
        if self._is_fake:
            own.copy_(self._view_of_own_part(layout, message))
            return _reduce_scatter(*_nothing(own), self._group)
        parts = list(message.split(layout.numel_by_rank))
        return dist.reduce_scatter(own, parts, group=self._group, async_op=True)

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._world.process_group

    def _view_of_own_part(self, layout: MessageLayout, message: Tensor) -> Tensor:
        start = sum(layout.numel_by_rank[: self._rank])
        return message[start : start + layout.numel_by_rank[self._rank]]


def _all_gather(full: Tensor, piece: Tensor, group: dist.ProcessGroup) -> Any:
    # torch 2.13 renamed it.
    op = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return op(full, piece, group=group, async_op=True)


def _reduce_scatter(own: Tensor, message: Tensor, group: dist.ProcessGroup) -> Any:
    # torch 2.13 renamed it.
    op = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return op(own, message, group=group, async_op=True)


def _nothing(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a fake world is given for uneven parts: it moves nothing, and a list for a thousand ranks is slow."""
    return like.new_empty(0), like.new_empty(0)
