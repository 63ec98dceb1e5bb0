"""Which gradients are reduced together: a unit's elements cut in buckets, about in the order backward makes them. Pure.

    unit of one chunk, members a (4 elements), b (3), c (3), buckets of at most 4 elements:

        bucket 0: c[0:3]     bucket 1: b[0:3]     bucket 2: a[0:4]          a longer member is cut in several

That order is the opposite of the members' own, small ones last. A layout that gives whole parameters to ranks sorts
its members by owner, and so the buckets of one owner come before the next one's.

A bucket is cut as its chunk is: who owns an element there owns it here, so that a bucket is a small chunk of its own,
without padding. Where no size is set a unit is one bucket, and the chunk itself, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeroexp.sharding.layout import Chunk, Member

SMALL_SHARE = 1 / 64  # of a bucket: members up to this come last


@dataclass(frozen=True)
class Range:
    """The elements [start, stop) of a flattened member."""

    member: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Slice:
    """Ranges of one chunk of a unit, and the same elements as a chunk of their own: a member for each range."""

    index: int  # of the chunk in its unit
    ranges: tuple[Range, ...]
    chunk: Chunk


@dataclass(frozen=True)
class Bucket:
    """What one reduction moves."""

    slices: tuple[Slice, ...]


def cut_in_buckets(
    chunks: Sequence[Chunk], itemsize: int, max_bytes: int | None
) -> tuple[Bucket, ...]:
    """The buckets of a unit, each of at most `max_bytes`, in the order of `_backwards`; None: one of all."""
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
    """Chunk index and range, last first; a long member in ranges of nearly equal size, its first range last.

    A LLaMA block defines its norms last, and one of them is the last to get a gradient: the bucket they are in waits
    for the whole block, and so it must be the last one.
    """
    members = [(index, each) for index, chunk in enumerate(chunks) for each in _whole(chunk)]
    members.reverse()
    members.sort(key=lambda pair: pair[1].numel <= SMALL_SHARE * most)  # stable
    for index, each in members:
        num = -(-each.numel // most)
        ends = [each.numel * i // num for i in range(num + 1)]
        for start, stop in reversed(list(pairwise(ends))):
            yield index, Range(each.member, start, stop)


def _bucket(chunks: Sequence[Chunk], picked: Sequence[tuple[int, Range]]) -> Bucket:
    indices = sorted({index for index, _ in picked})
    return Bucket(
        tuple(_slice(i, chunks[i], [r for index, r in picked if index == i]) for i in indices)
    )


def _slice(index: int, chunk: Chunk, picked: Sequence[Range]) -> Slice:
    """In the order of the chunk, so that owners follow one another as they do there."""
    ranges = tuple(sorted(picked, key=lambda each: (each.member, each.start)))
    members: list[Member] = []
    owned = [0] * (len(chunk.cuts) - 1)
    top = 0
    for each in ranges:
        whole = chunk.members[each.member]
        members.append(Member(whole.name, top, top + each.numel))
        top += each.numel
        low, high = whole.start + each.start, whole.start + each.stop
        for rank, (start, stop) in enumerate(pairwise(chunk.cuts)):
            owned[rank] += max(0, min(high, stop) - max(low, start))
    cuts = tuple(sum(owned[:rank]) for rank in range(len(owned) + 1))
    return Slice(index, ranges, Chunk(tuple(members), cuts, chunk.kind))
