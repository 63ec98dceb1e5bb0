"""The backend's own collectives (NCCL; in tests gloo and the fake group): at most one launch for each move.

What is asked of the backend follows from the sizes of the ranks' parts alone, see collective_layout.py, and is the same
over every backend. The backend decides the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.comm.base import GatherPart, Pending, ReducePart, Sent, Transport, WatchedWork
from zeroexp.comm.collective_layout import CollectiveLayout, collective_layout_of
from zeroexp.comm.packing import (
    begin_alike,
    join_gradients,
    pack_gradients,
    pack_pieces,
    unpack_sections,
    unpack_sums,
    views_of,
)
from zeroexp.comm.traits import TRAITS
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World


class Native(Transport):
    """Every move is one launch of the backend."""

    traits = TRAITS["native"]

    def __init__(self, world: World, moves: Moves):
        super().__init__(world, moves)
        self._reductions = world
        self._rank, self._size = world.rank, world.size

    @property
    def issued_checksum(self) -> int:
        return self._moves.checksum

    def reduce_apart(self) -> None:
        self._reductions = self._world.with_communicator("reductions")

    def connect(self) -> None:
        self._reductions.join()

    def all_gather(self, parts: Sequence[GatherPart], exposure: int, what: str) -> Sent:
        self._moves.record_collective(what)
        piece = parts[0].piece
        layout = collective_layout_of(tuple(part.chunk for part in parts), piece.itemsize)
        mine = pack_pieces(layout, self._rank, parts)
        message = parts[0].full if layout.is_chunk else piece.new_empty(layout.numel)
        works = self._issue_gather(layout, message, mine)
        unpack = None if layout.is_chunk else partial(unpack_sections, layout, message, parts)
        num_bytes = (self._size - 1) * layout.part_numel(self._rank) * piece.itemsize
        return self._pending(works, unpack, mine), num_bytes

    def reduce_scatter(self, parts: Sequence[ReducePart], what: str) -> Sent:
        self._moves.record_collective(what)
        dtype = parts[0].sent_dtype
        layout = collective_layout_of(tuple(part.chunk for part in parts), dtype.itemsize)
        join_gradients(layout, parts)
        message = parts[0].gradients[0].new_empty(layout.numel, dtype=dtype)
        pack_gradients(layout, message, parts)
        for part in parts:
            part.gradients.clear()  # the message holds copies; what rests nowhere is freed by this
        outs = [(out, part.accumulate) for part in parts for out in part.sums()]
        room = _room_for(message.dtype, layout.part_numel(self._rank), outs)
        own, works = self._issue_reduction(layout, message, room)
        hand_out = None
        if own is not room:
            hand_out = partial(unpack_sums, own, layout.spans(self._rank), outs)
        return self._pending(works, hand_out, message), message.nbytes - own.nbytes

    def all_reduce(self, parts: Sequence[ReducePart], what: str) -> Sent:
        self._moves.record_collective(what)
        gradients = [gradient for part in parts for gradient in part.gradients]
        ends = list(accumulate((gradient.numel() for gradient in gradients), initial=0))
        message = gradients[0].new_empty(ends[-1])
        sums = views_of(message, list(pairwise(ends)))
        torch._foreach_copy_(sums, gradients)
        num_bytes = 2 * message.nbytes * (self._size - 1) // self._size

        def spread() -> None:
            torch._foreach_copy_(gradients, sums)

        work = dist.all_reduce(message, group=self._reductions.process_group, async_op=True)
        return self._pending([work], spread), num_bytes

    def exchange(
        self, sent: Mapping[int, Tensor], num_bytes: Mapping[int, int], what: str
    ) -> tuple[Pending, dict[int, Tensor]]:
        self._moves.record_collective(what)
        # Each rank sends itself the bytes of a float32, which keep what follows aligned: torch refuses a rank that
        # sends nothing and receives something, or the other way.
        own = torch.zeros(4, dtype=torch.uint8, device=self._world.device)
        parts = [sent.get(rank, own) for rank in range(self._size)]
        message, sizes_sent = torch.cat(parts), [len(part) for part in parts]
        sizes = [num_bytes.get(rank, len(own)) for rank in range(self._size)]
        received = message.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            *(received, message, sizes, sizes_sent),
            group=self._reductions.process_group,
            async_op=True,
        )
        of_ranks = dict(enumerate(received.split(sizes)))
        return self._pending([work], None, message), of_ranks

    def _issue_gather(self, layout: CollectiveLayout, message: Tensor, mine: Tensor) -> list[Any]:
        """Gather the parts of all ranks into `message`; `mine` is this rank's part, which may lie in it."""
        group = self._world.process_group
        if layout.in_rows:
            return [_all_gather(message, mine, group)]
        parts = self._nonempty_parts(layout, message)
        if self._rank in parts and not begin_alike(parts[self._rank], mine):
            parts[self._rank].copy_(mine)
        calls = [partial(dist.broadcast, part, group_src=owner) for owner, part in parts.items()]
        return self._launch(calls, group)

    def _issue_reduction(
        self, layout: CollectiveLayout, message: Tensor, room: Tensor | None
    ) -> tuple[Tensor, list[Any]]:
        """Return where this rank's part of the sums will be, in `room` if that can be, and the works."""
        group = self._reductions.process_group
        if layout.in_rows:
            own = message.new_empty(layout.part_numel(self._rank)) if room is None else room
            return own, [_reduce_scatter(own, message, group)]
        parts = self._nonempty_parts(layout, message)
        calls = [partial(dist.reduce, part, group_dst=owner) for owner, part in parts.items()]
        return parts.get(self._rank, message[:0]), self._launch(calls, group)

    def _nonempty_parts(self, layout: CollectiveLayout, message: Tensor) -> dict[int, Tensor]:
        places = [layout.part(rank) for rank in layout.nonempty_ranks]
        return dict(zip(layout.nonempty_ranks, views_of(message, places), strict=True))

    def _launch(self, calls: Sequence[Callable[..., Any]], group: dist.ProcessGroup) -> list[Any]:
        """Launch collectives as one; gloo has no such thing."""
        if self._world.backend == "gloo":
            return [call(group=group, async_op=True) for call in calls]
        together = dist._coalescing_manager(group, self._world.device, async_ops=True)
        with together as launched:
            for call in calls:
                call(group=group, async_op=True)
        return [launched]

    def _pending(
        self, works: Sequence[Any], then: Callable[[], None] | None, *sent: Tensor
    ) -> Pending:
        return Pending([WatchedWork(work, self._moves, sent) for work in works], then)


def _room_for(dtype: torch.dtype, numel: int, outs: Sequence[tuple[Tensor, bool]]) -> Tensor | None:
    """Return the memory of new sums that lie side by side and are all of a rank's part of so many elements, or None."""
    if not outs:
        return None
    first, _ = outs[0]
    end = first.storage_offset()
    for out, adds in outs:
        same = out.untyped_storage() is first.untyped_storage() and out.dtype is dtype
        if adds or not same or out.storage_offset() != end:
            return None
        end += out.numel()
    whole = end - first.storage_offset() == numel
    return first.as_strided((numel,), (1,)) if whole else None


def _all_gather(full: Tensor, piece: Tensor, group: dist.ProcessGroup) -> Any:
    # torch 2.13 renamed it.
    op = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return op(full, piece, group=group, async_op=True)


def _reduce_scatter(own: Tensor, message: Tensor, group: dist.ProcessGroup) -> Any:
    # torch 2.13 renamed it.
    op = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return op(own, message, group=group, async_op=True)
