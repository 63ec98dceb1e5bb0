"""Buckets of gradients that are reduced together.

This is a unit of one chunk with members a (4 elements), b (3), c (3), in buckets of at most 4 elements:

        bucket 0: c[0:3]     bucket 1: b[0:3]     bucket 2: a[0:4]          a longer member is cut in several

Buckets come about in the order in which backward makes gradients: the members' order reversed, with small members last.
A layout that gives whole parameters to ranks sorts its members by owner, so the buckets of one owner follow each other.

A bucket is a small chunk of its own, without padding: each of its elements has the same owner as in the chunk. Where no
size is set a unit is one bucket, whose parts are the chunks themselves, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zeroexp.cut.chunk import Chunk, Member, Span

SMALL_SHARE = 1 / 64  # members of up to this share of a bucket come last


@dataclass(frozen=True)
class BucketPart:
    """Ranges of one chunk, and the same elements as a chunk of their own: a member for each range."""

    index: int  # index of the chunk in its unit
    ranges: tuple[Span, ...]  # `offset` counts from the beginning of the chunk
    chunk: Chunk


@dataclass(frozen=True)
class Bucket:
    """What one reduction moves."""

    parts: tuple[BucketPart, ...]


def cut_in_buckets(
    chunks: Sequence[Chunk], itemsize: int, max_bytes: int | None
) -> tuple[Bucket, ...]:
    """Cut a unit in buckets of at most `max_bytes`, in the order of `_backwards`; None makes one bucket of all."""
    if not chunks:
        return ()
    if max_bytes is None:
        return (
            Bucket(tuple(BucketPart(i, chunk.whole(), chunk) for i, chunk in enumerate(chunks))),
        )
    most = max(1, max_bytes // itemsize)
    buckets: list[dict[int, list[Span]]] = []  # index of a chunk -> ranges
    room = 0
    for index, each in _backwards(chunks, most):
        if each.numel > room:
            buckets.append({})
            room = most
        buckets[-1].setdefault(index, []).append(each)
        room -= each.numel
    return tuple(
        Bucket(tuple(_part(index, chunks[index], ranges[index]) for index in sorted(ranges)))
        for ranges in buckets
    )


def _backwards(chunks: Sequence[Chunk], most: int) -> Iterator[tuple[int, Span]]:
    """Yield chunk index and range, last first; a long member is cut in ranges of nearly equal size.

    Small members come last: a LLaMA block defines its norms last, and one of them is the last to get a gradient. The
    bucket of the norms waits for the whole block, so it must be the last bucket.
    """
    members = [(index, each) for index, chunk in enumerate(chunks) for each in chunk.whole()]
    members.reverse()
    members.sort(key=lambda pair: pair[1].numel <= SMALL_SHARE * most)  # sort is stable
    for index, each in members:
        num = -(-each.numel // most)
        ends = [each.numel * i // num for i in range(num + 1)]
        for start, stop in reversed(list(pairwise(ends))):
            yield index, Span(each.member, start, stop, each.offset + start)


def _part(index: int, chunk: Chunk, picked: Sequence[Span]) -> BucketPart:
    """Make a slice in the order of the chunk, so that owners follow one another as they do there."""
    ranges = tuple(sorted(picked, key=lambda each: each.offset))
    ends = list(accumulate((each.numel for each in ranges), initial=0))
    members = tuple(
        Member(chunk.members[each.member].name, *place)
        for each, place in zip(ranges, pairwise(ends), strict=True)
    )
    owned = [0] * (len(chunk.cuts) - 1)
    for each in ranges:
        for rank, start, stop in chunk.shares(each.offset, each.offset + each.numel):
            owned[rank] += stop - start
    cuts = (0, *accumulate(owned))
    return BucketPart(index, ranges, Chunk(members, cuts, chunk.kind, over_all=chunk.over_all))
