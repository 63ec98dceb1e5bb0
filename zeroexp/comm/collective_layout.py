"""How the parts of all ranks lie in one message of the backend: arithmetic, the same on every rank and in a plan.

    chunks cut for two ranks    a: a0 a1      b: b0 b1
    message                     | a0 b0 | a1 b1 |            rank 0's part, rank 1's part

Parts of one size travel by one even collective. Parts of several sizes (whole parameters have owners) travel

    in rows         | a0 a0 . . | a1 a1 a1 a1 |     by one even collective, each part padded to the longest one, or
    one by one      | a0 a0 | a1 a1 a1 a1 |         by a broadcast or a reduction for each owner, launched together

whichever takes less time: a row costs the bytes of its padding, and each owner after the first costs an operation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from zeroexp.cut.chunk import Chunk

# What a link carries in the time of one more operation in a launch: some 5 us at 50 GB/s.
OPERATION_BYTES = 256 << 10
NUM_REMEMBERED = 4096  # layouts kept; each unit and bucket of a model has one


@dataclass(frozen=True)
class MessageRun:
    """Neighbouring elements of one chunk, or of one member of it, that begin at `at` in the message."""

    chunk: int
    start: int
    stop: int
    at: int
    member: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Where the elements lie in the message."""
        return self.at, self.at + self.stop - self.start


@dataclass(frozen=True)
class CollectiveLayout:
    """The message of these chunks, which are cut for the same ranks; `itemsize` is of the elements that travel."""

    chunks: tuple[Chunk, ...]
    itemsize: int

    @property
    def num_ranks(self) -> int:
        return len(self.chunks[0].cuts) - 1

    @cached_property
    def nonempty_ranks(self) -> list[int]:
        """The ranks that have something."""
        return [rank for rank, numel in enumerate(self._section_numels) if numel]

    @cached_property
    def in_rows(self) -> bool:
        """Whether the parts are padded to one size, where they have not got one, and travel by an even collective."""
        padding = self.num_ranks * self._longest - sum(self._section_numels)
        return padding * self.itemsize <= OPERATION_BYTES * (len(self.nonempty_ranks) - 1)

    def part_numel(self, rank: int) -> int:
        """Return the elements of a rank's part of the message, padding included."""
        return self._longest if self.in_rows else self._section_numels[rank]

    def part(self, rank: int) -> tuple[int, int]:
        """Return where a rank's part begins and ends."""
        return self._starts[rank], self._starts[rank] + self.part_numel(rank)

    @property
    def numel(self) -> int:
        return self._starts[-1]

    @cached_property
    def is_chunk(self) -> bool:
        """Whether the message is a chunk as it is."""
        return len(self.chunks) == 1 and self.chunks[0].cuts == tuple(self._starts)

    @cached_property
    def is_table(self) -> bool:
        """Whether the message is a table of ranks in which each chunk, cut in as many rows as it fills, is a column.

        No column is empty, as one is that only padding of a group's piece is left for.
        """
        num = self.num_ranks
        widths = [-(-chunk.unpadded_numel // num) for chunk in self.chunks]
        return all(widths) and all(
            chunk.even and chunk.cuts[1] == width
            for chunk, width in zip(self.chunks, widths, strict=True)
        )

    @cached_property
    def sections(self) -> list[MessageRun]:
        """The sections of all ranks, in the order of the message; those that also lie together in a chunk are one."""
        runs: list[MessageRun] = []
        for run in self._section_of_each_chunk():
            last = runs[-1] if runs else None
            if last and (last.chunk, last.stop, last.place[1]) == (run.chunk, run.start, run.at):
                runs[-1] = MessageRun(run.chunk, last.start, run.stop, last.at)
            else:
                runs.append(run)
        return runs

    def _section_of_each_chunk(self) -> Iterator[MessageRun]:
        for rank in self.nonempty_ranks:
            at = self._starts[rank]
            for index, chunk in enumerate(self.chunks):
                start, stop = chunk.cuts[rank], chunk.cuts[rank + 1]
                if start < stop:
                    yield MessageRun(index, start, stop, at)
                at += stop - start

    @cached_property
    def members(self) -> list[MessageRun]:
        """What lies of members in the sections, in the same order; elements count from the member's beginning."""
        return [run for section in self.sections for run in _members_in(self.chunks, section)]

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """Return where the spans that `rank` owns lie in its part."""
        before = accumulate((chunk.section_numel(rank) for chunk in self.chunks), initial=0)
        return [
            (start + span.offset, start + span.offset + span.numel)
            for start, chunk in zip(before, self.chunks, strict=False)
            for span in chunk.spans(rank)
        ]

    @cached_property
    def _section_numels(self) -> list[int]:
        """For each rank, the elements of its sections."""
        ranks = range(self.num_ranks)
        return [sum(chunk.section_numel(rank) for chunk in self.chunks) for rank in ranks]

    @cached_property
    def _longest(self) -> int:
        return max(self._section_numels)

    @cached_property
    def _starts(self) -> list[int]:
        """Where each rank's part begins, and the end of the message."""
        return list(accumulate(map(self.part_numel, range(self.num_ranks)), initial=0))


@lru_cache(maxsize=NUM_REMEMBERED)
def collective_layout_of(chunks: tuple[Chunk, ...], itemsize: int) -> CollectiveLayout:
    return CollectiveLayout(chunks, itemsize)


def _members_in(chunks: tuple[Chunk, ...], section: MessageRun) -> Iterator[MessageRun]:
    members = chunks[section.chunk].members
    first = bisect_right(members, section.start, key=lambda member: member.stop)
    for index, member in enumerate(members[first:], first):
        start, stop = max(member.start, section.start), min(member.stop, section.stop)
        if start >= stop:  # the rest is padding, or lies elsewhere
            return
        at = section.at + start - section.start
        yield MessageRun(section.chunk, start - member.start, stop - member.start, at, index)
