"""The backend's own collectives (NCCL, the fake group): sums run in the backend's order.

Even sections travel by reduce-scatter and all-gather, others by one reduce or broadcast for each owner.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.sharding.direct import sum_into
from zeroexp.sharding.form import REDUCTIONS_IN_FLIGHT
from zeroexp.sharding.moves import GatherPart, Pending, ReducePart


class Native:
    """The backend's own collectives; sums run in the backend's order."""

    staging_bytes = shared_bytes = 0
    moves_on_wait = False
    page_bytes = 4096  # nothing is mapped: machines of any pages cut alike
    reductions_in_flight = REDUCTIONS_IN_FLIGHT["native"]

    def __init__(self, rank: int, size: int):
        self._rank = rank
        self._size = size
        self.gathered = 0  # a checksum of what was gathered so far, in order

    def meet(self) -> bool:
        return False  # the backend knows its own ways

    def reserve(self, rest_bytes: int, slot_bytes: int) -> None:
        """Any memory will do."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def quiesce(self) -> None:
        """The backend has read a tensor when the move that sends it was waited for."""

    def place_of(self, tensor: Tensor) -> None:
        return None

    def offer(self, parts: Sequence[GatherPart], offer: int | None) -> int:
        return 0  # the backend reads a piece when it is gathered

    def all_gather(
        self, parts: Sequence[GatherPart], offer: int | None, what: str
    ) -> tuple[Pending, int]:
        self.gathered = zlib.crc32(what.encode(), self.gathered)
        works: list[Any] = []
        num_bytes = 0
        for part in parts:
            if part.chunk.even:
                works.append(_all_gather(part.full, part.piece))
                num_bytes += part.piece.nbytes * (self._size - 1)
                continue
            own = part.full[part.chunk.section(self._rank)]
            if own.data_ptr() != part.piece.data_ptr():
                own.copy_(part.piece)
            for owner in range(self._size):
                section = part.full[part.chunk.section(owner)]
                works.append(self._async(dist.broadcast, section, owner))
            num_bytes += own.nbytes * (self._size - 1)
        return Pending(works), num_bytes

    def reduce_scatter(self, parts: Sequence[ReducePart], what: str) -> tuple[Pending, int]:
        works: list[Any] = []
        flats = [_flatten(part) for part in parts]
        sections: list[Tensor] = []
        for part, flat in zip(parts, flats, strict=True):
            own = flat[part.chunk.section(self._rank)]
            if part.chunk.even:
                own = torch.empty_like(own)
                works.append(_reduce_scatter(own, flat))
            else:
                for owner in range(self._size):
                    section = flat[part.chunk.section(owner)]
                    works.append(self._async(dist.reduce, section, owner))
            sections.append(own)

        def hand_out() -> None:
            for part, own in zip(parts, sections, strict=True):
                for span, out in zip(part.chunk.spans(self._rank), part.out, strict=True):
                    sum_into(out, [own[span.offset : span.offset + span.numel]], part.accumulate)

        sent = sum(f.nbytes - s.nbytes for f, s in zip(flats, sections, strict=True))
        return Pending(works, hand_out), sent

    def all_reduce(self, parts: Sequence[ReducePart], what: str) -> tuple[Pending, int]:
        flats = [_flatten(part) for part in parts]
        works = [dist.all_reduce(flat, async_op=True) for flat in flats]

        def spread() -> None:
            for part, flat in zip(parts, flats, strict=True):
                for member, gradient in zip(part.chunk.members, part.gradients, strict=True):
                    gradient.copy_(flat[member.start : member.stop])

        sent = 2 * sum(flat.nbytes for flat in flats) * (self._size - 1) // self._size
        return Pending(works, spread), sent

    def _async(self, op: Callable[..., Any], section: Tensor, owner: int) -> Any:
        return op(section, owner, async_op=True)


def _flatten(part: ReducePart) -> Tensor:
    """The chunk's gradients as one padded flat tensor."""
    flat = part.gradients[0].new_zeros(part.chunk.padded_numel)
    for member, gradient in zip(part.chunk.members, part.gradients, strict=True):
        flat[member.start : member.stop].copy_(gradient)
    return flat


def _all_gather(full: Tensor, piece: Tensor) -> Any:
    # renamed in torch 2.13
    op = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return op(full, piece, async_op=True)


def _reduce_scatter(own: Tensor, flat: Tensor) -> Any:
    # renamed in torch 2.13
    op = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return op(own, flat, async_op=True)
