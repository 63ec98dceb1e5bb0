"""A bucket holds the gradients that are reduced together. This file cuts units in buckets; it is pure arithmetic.

This is a unit of one chunk with members a (4 elements), b (3), c (3), in buckets of at most 4 elements:

        bucket 0: c[0:3]     bucket 1: b[0:3]     bucket 2: a[0:4]          a longer member is cut in several

Buckets come about in the order in which backward makes gradients: the members' order reversed, with small members last.
A layout that gives whole parameters to ranks sorts its members by owner, so the buckets of one owner follow each other.

A bucket is a small chunk of its own, without padding: each of its elements has the same owner as in the chunk. Where no
size is set a unit is one bucket, whose slices are the chunks themselves, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zeroexp.cut.chunk import Chunk, Member

SMALL_SHARE = 1 / 64  # members of up to this share of a bucket come last


@dataclass(frozen=True)
class Range:
    """A range is the elements [start, stop) of a flattened member."""

    member: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Slice:
    """A slice holds ranges of one chunk, and the same elements as a chunk of their own: a member for each range."""

    index: int  # index of the chunk in its unit
    ranges: tuple[Range, ...]
    chunk: Chunk


@dataclass(frozen=True)
class Bucket:
    """A bucket is what one reduction moves."""

    slices: tuple[Slice, ...]


def cut_in_buckets(
    chunks: Sequence[Chunk], itemsize: int, max_bytes: int | None
) -> tuple[Bucket, ...]:
    """Cut a unit in buckets of at most `max_bytes`, in the order of `_backwards`; None makes one bucket of all."""
    if not chunks:
        return ()
    if max_bytes is None:
        whole = (Slice(index, _whole(chunk), chunk) for index, chunk in enumerate(chunks))
        return (Bucket(tuple(whole)),)
    most = max(1, max_bytes // itemsize)
    buckets: list[list[tuple[int, Range]]] = []
    room = 0
    for index, each in _backwards(chunks, most):
        if each.numel > room:
            buckets.append([])
            room = most
        buckets[-1].append((index, each))
        room -= each.numel
    return tuple(_bucket(chunks, each) for each in buckets)


def _whole(chunk: Chunk) -> tuple[Range, ...]:
    return tuple(Range(i, 0, m.stop - m.start) for i, m in enumerate(chunk.members))


def _backwards(chunks: Sequence[Chunk], most: int) -> Iterator[tuple[int, Range]]:
    """Yield chunk index and range, last first; a long member is cut in ranges of nearly equal size.

    Small members come last: a LLaMA block defines its norms last, and one of them is the last to get a gradient. The
    bucket of the norms waits for the whole block, so it must be the last bucket.
    """
    members = [(index, each) for index, chunk in enumerate(chunks) for each in _whole(chunk)]
    members.reverse()
    members.sort(key=lambda pair: pair[1].numel <= SMALL_SHARE * most)  # sort is stable
    for index, each in members:
        num = -(-each.numel // most)
        ends = [each.numel * i // num for i in range(num + 1)]
        for start, stop in reversed(list(pairwise(ends))):
            yield index, Range(each.member, start, stop)


def _bucket(chunks: Sequence[Chunk], picked: Sequence[tuple[int, Range]]) -> Bucket:
    ranges: dict[int, list[Range]] = {}
    for index, each in picked:
        ranges.setdefault(index, []).append(each)
    return Bucket(tuple(_slice(i, chunks[i], ranges[i]) for i in sorted(ranges)))


def _slice(index: int, chunk: Chunk, picked: Sequence[Range]) -> Slice:
    """Make a slice in the order of the chunk, so that owners follow one another as they do there."""
    ranges = tuple(sorted(picked, key=lambda each: (each.member, each.start)))
    members: list[Member] = []
    owned = [0] * (len(chunk.cuts) - 1)
    top = 0
    for each in ranges:
        whole = chunk.members[each.member]
        members.append(Member(whole.name, top, top + each.numel))
        top += each.numel
        low, high = whole.start + each.start, whole.start + each.stop
        for rank, start, stop in chunk.shares(low, high):
            owned[rank] += stop - start
    cuts = (0, *accumulate(owned))
    return Slice(index, ranges, Chunk(tuple(members), cuts, chunk.kind))
