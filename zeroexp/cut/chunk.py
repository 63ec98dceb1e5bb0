"""A chunk is what one collective moves: parameters side by side, and cuts that say which rank owns which elements.

This is a chunk of three members (a: 4, b: 3, c: 3 elements) on 4 ranks, cut evenly:

        element   0 1 2 3 4 5 6 7 8 9 . .      cuts = (0, 3, 6, 9, 12); '.' is padding, always zero
        member    a a a a b b b c c c
        rank      0 0 0 1 1 1 2 2 2 3 3 3      rank 1 owns the spans a[3:4] and b[0:2]
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

FROZEN = "frozen"  # the kind of parameters that get no gradient
# The kind of those that the optimizer steps as whole matrices; of a row of `optimizer.kinds` it is the last word.
MATRIX = "matrix"
# By word of `offload`, the kinds of states that rest on the host, of chunks that are marked `on_host`.
HOST_PARTS = {
    "optimizer": frozenset({"optimizer", "master"}),
    "all": frozenset({"optimizer", "master", "parameters"}),
}


@dataclass(frozen=True)
class ParameterSpec:
    name: str
    numel: int
    itemsize: int  # bytes of one element
    kind: str = (
        ""  # what all parameters of one chunk share: whether, and in which way, they are trained
    )
    layout: str = ""  # its own, a word of LAYOUTS; empty: that of all others
    rows: int = 1  # the size of its first dimension, for layouts that cut between rows


@dataclass(frozen=True)
class Member:
    """A parameter inside a chunk: it fills the elements [start, stop) of the chunk."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Span:
    """The elements [start, stop) of a flattened member; they lie at `offset` in their owner's piece."""

    member: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """What one collective moves: members side by side, then padding; rank r owns cuts[r]:cuts[r+1]."""

    members: tuple[Member, ...]
    cuts: tuple[int, ...]
    kind: str = ""
    # What HOST_PARTS names of it rests on the host.
    on_host: bool = False
    # Of what a rank holds of it, replicas update a share each (comm/replicas.py); else they all update the same.
    over_all: bool = False

    def __hash__(self) -> int:
        return self._checksum

    @cached_property
    def _checksum(self) -> int:
        """Computed once, since every move looks up chunks, and alike in every process, since chunks are pickled."""
        return zlib.crc32(repr((self.members, self.cuts, self.kind)).encode())

    @property
    def unpadded_numel(self) -> int:
        """Number of real elements, without padding."""
        return self.members[-1].stop

    @property
    def padded_numel(self) -> int:
        return self.cuts[-1]

    @property
    def even(self) -> bool:
        """Whether every rank owns equally many elements, so that collectives of even sections apply."""
        return len({b - a for a, b in zip(self.cuts, self.cuts[1:], strict=False)}) == 1

    def section(self, rank: int) -> slice:
        """Return the elements of the chunk that `rank` owns, padding included."""
        return slice(self.cuts[rank], self.cuts[rank + 1])

    def section_numel(self, rank: int) -> int:
        """Return the number of elements that `rank` owns, padding included."""
        return self.cuts[rank + 1] - self.cuts[rank]

    def real_section(self, rank: int) -> slice:
        """Return the elements of the chunk that `rank` owns, without padding."""
        start, stop = self.cuts[rank], self.cuts[rank + 1]
        return slice(min(start, self.unpadded_numel), min(stop, self.unpadded_numel))

    def real_numel(self, rank: int) -> int:
        """Return the number of elements that `rank` owns, without padding."""
        real = self.real_section(rank)
        return real.stop - real.start

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return, in order, the parts of members that `rank` owns; padding belongs to no span."""
        return self._spans_by_rank[rank]

    def whole(self) -> tuple[Span, ...]:
        """Return a span for each whole member, as a rank owns it where nothing is sharded; `offset` is in the chunk."""
        return tuple(Span(i, 0, m.stop - m.start, m.start) for i, m in enumerate(self.members))

    def for_ranks(self, num_ranks: int) -> Chunk:
        """Return the chunk cut for fewer ranks, each of which holds what as many neighbours own together."""
        neighbours = (len(self.cuts) - 1) // num_ranks
        return self if neighbours == 1 else replace(self, cuts=self.cuts[::neighbours])

    def within(self, place: int, num_ranks: int) -> Chunk:
        """Return what one of so many ranks holds, see `for_ranks`, as a chunk cut for the neighbours that share it."""
        size = (len(self.cuts) - 1) // num_ranks
        first, *others = self.cuts[place * size : (place + 1) * size + 1]
        members = tuple(
            Member(self.members[span.member].name, span.offset, span.offset + span.numel)
            for span in self.for_ranks(num_ranks).spans(place)
        )
        cuts = (0, *(cut - first for cut in others))
        return Chunk(members or (Member("padding", 0, 0),), cuts, self.kind)

    def shares(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, start, stop) for each part of these elements that one rank owns."""
        rank = bisect_right(self.cuts, start) - 1
        while start < stop:
            end = min(stop, self.cuts[rank + 1])
            if start < end:
                yield rank, start, end
            start, rank = end, rank + 1

    @cached_property
    def _spans_by_rank(self) -> tuple[tuple[Span, ...], ...]:
        spans: list[list[Span]] = [[] for _ in self.cuts[1:]]
        for index, member in enumerate(self.members):
            for rank, start, stop in self.shares(member.start, member.stop):
                first, last = start - member.start, stop - member.start
                spans[rank].append(Span(index, first, last, start - self.cuts[rank]))
        return tuple(map(tuple, spans))
