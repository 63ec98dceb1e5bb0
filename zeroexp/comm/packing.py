"""Several chunks in one message, rank by rank: the sections that one rank owns lie side by side.

    chunks cut for two ranks    a: a0 a1      b: b0 b1
    message                     | a0 b0 | a1 b1 |            rank 0's part, rank 1's part

The message of one chunk is the chunk itself. Nothing in this file communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from zeroexp.comm.base import GatherPart
from zeroexp.sharding.layout import Chunk

PADDING = -1
NUM_REMEMBERED = 4096  # packings kept; each unit and bucket of a model has one


@dataclass(frozen=True)
class Piece:
    """A run of elements in a message that belong to one member, or that are padding."""

    chunk: int
    member: int
    numel: int

    @property
    def is_padding(self) -> bool:
        return self.member == PADDING


@dataclass(frozen=True)
class Packing:
    """How the message of these chunks is laid out; all of them are cut for the same ranks."""

    chunks: tuple[Chunk, ...]

    @property
    def world_size(self) -> int:
        return len(self.chunks[0].cuts) - 1

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each rank's part of the message, padding included."""
        return [
            sum(_length(chunk.section(rank)) for chunk in self.chunks)
            for rank in range(self.world_size)
        ]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def is_even(self) -> bool:
        """Whether all ranks' parts have one size, so that the even primitives apply."""
        return len(set(self.sizes)) == 1

    @cached_property
    def _sections(self) -> list[int]:
        """Lengths of the sections, in the order of the message."""
        ranks = range(self.world_size)
        return [_length(chunk.section(rank)) for rank in ranks for chunk in self.chunks]

    @cached_property
    def _pieces_by_rank(self) -> list[list[Piece]]:
        """For each rank, the pieces of its part of the message, in order."""
        return [list(_pieces_of(self.chunks, rank)) for rank in range(self.world_size)]

    @cached_property
    def _pieces(self) -> list[Piece]:
        return [piece for pieces in self._pieces_by_rank for piece in pieces]

    @cached_property
    def _cuts_of_members(self) -> list[list[list[int]]]:
        """For each member of each chunk, the lengths of its pieces."""
        lengths: list[list[list[int]]] = [[[] for _ in chunk.members] for chunk in self.chunks]
        for piece in self._pieces:
            if not piece.is_padding:
                lengths[piece.chunk][piece.member].append(piece.numel)
        return lengths

    def pack_gradients(self, message: Tensor, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Copy the flat gradients of each chunk's members into the message; padding is not written."""
        cut = [
            [list(g.split(lengths)) for g, lengths in zip(each, members, strict=True)]
            for each, members in zip(gradients, self._cuts_of_members, strict=True)
        ]
        real = [piece for piece in self._pieces if not piece.is_padding]
        sources = [cut[piece.chunk][piece.member].pop(0) for piece in real]
        torch._foreach_copy_(_real_parts(message, self._pieces), sources)

    def spans_of(self, rank: int, own: Tensor) -> list[Tensor]:
        """Return views of the spans that `rank` owns; `own` is its part of the message."""
        return _real_parts(own, self._pieces_by_rank[rank])

    def padded(self, mine: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for the ranks' parts, all as long as the longest, and `mine` padded to that length."""
        longest = max(self.sizes)
        sent = torch.cat([mine, mine.new_empty(longest - mine.numel())])
        return mine.new_empty(longest * self.world_size), sent

    def unpad(self, padded: Tensor, message: Tensor) -> None:
        """Copy the ranks' parts from the padded memory into the message."""
        longest = max(self.sizes)
        lengths = [length for size in self.sizes for length in (size, longest - size)]
        torch._foreach_copy_(list(message.split(self.sizes)), list(padded.split(lengths)[::2]))

    def unpack_sections(self, message: Tensor, parts: Sequence[GatherPart]) -> None:
        """Copy every section of the message to its place in the full chunks."""
        rows = [part.by_rank for part in parts if part.by_rank is not None]
        if len(rows) == len(parts):
            lengths = [row.shape[1] for row in rows]
            torch.split_with_sizes_copy(message.view(self.world_size, -1), lengths, dim=1, out=rows)
            return
        places = [part.full.split(_lengths(part.chunk)) for part in parts]
        targets = [place[rank] for rank in range(self.world_size) for place in places]
        torch._foreach_copy_(targets, list(message.split(self._sections)))


@lru_cache(maxsize=NUM_REMEMBERED)
def packing_of(chunks: tuple[Chunk, ...]) -> Packing:
    return Packing(chunks)


def _pieces_of(chunks: Sequence[Chunk], rank: int) -> Iterator[Piece]:
    for index, chunk in enumerate(chunks):
        for span in chunk.spans(rank):
            yield Piece(index, span.member, span.numel)
        padding = _length(chunk.section(rank)) - _length(chunk.real_section(rank))
        if padding:
            yield Piece(index, PADDING, padding)


def _real_parts(flat: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the parts of `flat` that are not padding."""
    parts = flat.split([piece.numel for piece in pieces])
    return [part for part, piece in zip(parts, pieces, strict=True) if not piece.is_padding]


def _lengths(chunk: Chunk) -> list[int]:
    return [_length(chunk.section(rank)) for rank in range(len(chunk.cuts) - 1)]


def _length(section: slice) -> int:
    return section.stop - section.start
