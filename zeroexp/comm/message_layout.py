"""One message carries several chunks, rank by rank: the sections that one rank owns lie side by side.

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
from zeroexp.cut.chunk import Chunk

PADDING = -1
# From so many ranks on, chunks are copied as columns of a table: a column takes two copies that jump from rank to rank,
# else every rank's piece of every chunk takes a part of one copy.
MANY_RANKS = 128
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
class MessageLayout:
    """This layout tells how the message of these chunks lies; all of them are cut for the same ranks."""

    chunks: tuple[Chunk, ...]

    @property
    def world_size(self) -> int:
        return len(self.chunks[0].cuts) - 1

    @cached_property
    def numel_by_rank(self) -> list[int]:
        """Elements of each rank's part of the message, padding included."""
        return [
            sum(_length(chunk.section(rank)) for chunk in self.chunks)
            for rank in range(self.world_size)
        ]

    @property
    def numel(self) -> int:
        return sum(self.numel_by_rank)

    @property
    def is_even(self) -> bool:
        """Whether all ranks' parts have one size, so that the even primitives apply."""
        return len(set(self.numel_by_rank)) == 1

    @cached_property
    def _sections(self) -> list[int]:
        """Lengths of the sections, in the order of the message."""
        ranks = range(self.world_size)
        return [_length(chunk.section(rank)) for rank in ranks for chunk in self.chunks]

    @cached_property
    def _pieces(self) -> list[Piece]:
        """The pieces of all ranks' parts of the message, in order."""
        return [piece for rank in range(self.world_size) for piece in _pieces_of(self.chunks, rank)]

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
        if len(self.chunks) == 1:  # the message is the chunk
            (flats,), (chunk,) = gradients, self.chunks
            lengths = [*(flat.numel() for flat in flats), chunk.padded_numel - chunk.unpadded_numel]
            torch._foreach_copy_(message.split(lengths)[:-1], list(flats))
            return
        if self.world_size >= MANY_RANKS and self._is_table:
            torch._foreach_copy_(*self._rows_of(message, [flat for (flat,) in gradients]))
            return
        cut = [
            [list(g.split(lengths)) for g, lengths in zip(each, members, strict=True)]
            for each, members in zip(gradients, self._cuts_of_members, strict=True)
        ]
        real = [piece for piece in self._pieces if not piece.is_padding]
        sources = [cut[piece.chunk][piece.member].pop(0) for piece in real]
        torch._foreach_copy_(_real_parts(message, self._pieces), sources)

    @cached_property
    def _is_table(self) -> bool:
        """Whether every rank has as much of a chunk, which is one member: a column of the message's table of ranks."""
        return all(chunk.even and len(chunk.members) == 1 for chunk in self.chunks)

    def _rows_of(
        self, message: Tensor, flats: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the places of flat tensors in the table, and the tensors: its full rows, then a shorter one."""
        widths = [_length(chunk.section(0)) for chunk in self.chunks]
        places: list[Tensor] = []
        sources: list[Tensor] = []
        for flat, column in zip(
            flats, message.view(self.world_size, -1).split(widths, dim=1), strict=True
        ):
            num_full, rest = divmod(flat.numel(), column.shape[1])
            full, last = flat.split([num_full * column.shape[1], rest])
            places += [column[:num_full], *([column[num_full, :rest]] if rest else [])]
            sources += [full.view(num_full, -1), *([last] if rest else [])]
        return places, sources

    def spans_of(self, rank: int, own: Tensor) -> list[Tensor]:
        """Return views of the spans that `rank` owns; `own` is its part of the message."""
        return _real_parts(own, list(_pieces_of(self.chunks, rank)))

    def pad_sections(self, mine: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for the ranks' parts, all as long as the longest, and `mine` padded to that length."""
        longest = max(self.numel_by_rank)
        sent = torch.cat([mine, mine.new_empty(longest - mine.numel())])
        return mine.new_empty(longest * self.world_size), sent

    def unpad_sections(self, padded: Tensor, message: Tensor) -> None:
        """Copy the ranks' parts from the padded memory into the message."""
        longest = max(self.numel_by_rank)
        lengths = [length for size in self.numel_by_rank for length in (size, longest - size)]
        torch._foreach_copy_(
            list(message.split(self.numel_by_rank)), list(padded.split(lengths)[::2])
        )

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
def message_layout_of(chunks: tuple[Chunk, ...]) -> MessageLayout:
    return MessageLayout(chunks)


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
