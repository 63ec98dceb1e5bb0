"""Buckets as arithmetic: every element is reduced once, by the rank that owns it in the chunk, in the agreed order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroexp.cut.bucket import SMALL_SHARE, BucketPart, cut_in_buckets
from zeroexp.cut.chunk import Chunk, ParameterSpec, Span
from zeroexp.cut.layout import lay_out

Element = tuple[int, int, int]  # chunk, member, element of it

units = st.lists(st.integers(1, 300), min_size=1, max_size=6)
cuts = {
    "family": st.sampled_from(["parameter", "tensor", "buffer"]),
    "numels": units,
    "world_size": st.integers(1, 5),
    "most": st.integers(1, 400),  # elements
}


def chunks_of(family: str, numels: list[int], world_size: int) -> tuple[Chunk, ...]:
    specs = [ParameterSpec(str(index), numel, 4) for index, numel in enumerate(numels)]
    return lay_out(family, [specs], world_size)[0]


def elements(part: BucketPart, rank: int) -> list[Element]:
    """What `rank` owns of a slice, told in elements of the chunk it was cut from."""
    return [
        (part.index, part.ranges[span.member].member, part.ranges[span.member].start + element)
        for span in part.chunk.spans(rank)
        for element in range(span.start, span.stop)
    ]


def owned(chunks: tuple[Chunk, ...], rank: int) -> list[Element]:
    return [
        (index, span.member, element)
        for index, chunk in enumerate(chunks)
        for span in chunk.spans(rank)
        for element in range(span.start, span.stop)
    ]


@settings(max_examples=60, deadline=None)
@given(**cuts)
def test_every_element_is_reduced_once_by_its_owner(family, numels, world_size, most):
    chunks = chunks_of(family, numels, world_size)
    buckets = cut_in_buckets(chunks, 4, 4 * most)
    for rank in range(world_size):
        found = [e for b in buckets for part in b.parts for e in elements(part, rank)]
        assert Counter(found) == Counter(owned(chunks, rank))


def test_a_bucket_takes_what_just_fits():
    chunks = chunks_of("buffer", [200, 100, 100], world_size=2)
    assert len(cut_in_buckets(chunks, itemsize=4, max_bytes=4 * 200)) == 2


@settings(max_examples=60, deadline=None)
@given(**cuts)
def test_no_bucket_is_larger_and_none_could_take_the_next(family, numels, world_size, most):
    chunks = chunks_of(family, numels, world_size)
    buckets = cut_in_buckets(chunks, 4, 4 * most)
    sizes = [sum(part.chunk.unpadded_numel for part in bucket.parts) for bucket in buckets]
    assert max(sizes) <= most

    def place(index: int, each: Span) -> tuple[bool, int, int, int]:
        """The range taken first has the highest: a large member, and the last of those."""
        member = chunks[index].members[each.member]
        is_large = member.stop - member.start > SMALL_SHARE * most
        return is_large, index, each.member, each.start

    for size, after in zip(sizes, buckets[1:], strict=False):
        ranges = [(part.index, each) for part in after.parts for each in part.ranges]
        _, first = max(ranges, key=lambda pair: place(*pair))
        assert size + first.numel > most


@settings(max_examples=60, deadline=None)
@given(**cuts)
def test_the_first_range_of_a_member_comes_last(family, numels, world_size, most):
    """Whoever sees it may let the whole gradient go."""
    left = Counter(
        {
            (index, number): member.stop - member.start
            for index, chunk in enumerate(chunks_of(family, numels, world_size))
            for number, member in enumerate(chunk.members)
        }
    )
    for bucket in cut_in_buckets(chunks_of(family, numels, world_size), 4, 4 * most):
        for part in bucket.parts:
            for each in part.ranges:
                left[part.index, each.member] -= each.numel
            for each in part.ranges:
                assert (left[part.index, each.member] == 0) == (
                    min(r.start for r in part.ranges if r.member == each.member) == 0
                )


def test_without_a_size_a_unit_is_one_bucket_and_its_chunks_themselves():
    """Padding included, so that the backend's even primitives apply."""
    chunks = chunks_of("tensor", [5, 7], 4)
    (bucket,) = cut_in_buckets(chunks, 4, None)
    assert tuple(part.chunk for part in bucket.parts) == chunks
    assert cut_in_buckets((), 4, None) == ()
    assert cut_in_buckets((), 4, 100) == ()


@pytest.mark.parametrize("family", ["tensor", "buffer"])
def test_a_norm_defined_last_keeps_no_bucket_waiting(family):
    """The members of a LLaMA block as it defines them. Its backward makes `first_norm` last of all."""
    block = {"q": 640, "k": 640, "gate": 1700, "up": 1700, "down": 1700}
    block |= {"first_norm": 8, "second_norm": 8}
    specs = [ParameterSpec(name, numel, 4) for name, numel in block.items()]
    chunks = lay_out(family, [specs], 2)[0]
    buckets = cut_in_buckets(chunks, 4, 4 * 2000)
    names = [
        [chunks[part.index].members[each.member].name for part in b.parts for each in part.ranges]
        for b in buckets
    ]
    assert names == [["down"], ["up"], ["gate"], ["q", "k", "first_norm", "second_norm"]]


def test_the_picture_of_the_page():
    (chunk,) = chunks_of("buffer", [4, 3, 3], 4)
    buckets = cut_in_buckets([chunk], 4, 16)
    ranges = [[(r.member, r.start, r.stop) for r in b.parts[0].ranges] for b in buckets]
    assert ranges == [[(2, 0, 3)], [(1, 0, 3)], [(0, 0, 4)]]


def test_small_is_up_to_a_64th_of_a_bucket():
    """Of 128 elements: two are small and come last, three are not."""
    chunks = chunks_of("buffer", [2, 120, 3, 120], 2)
    ranges = [
        [each.member for part in bucket.parts for each in part.ranges]
        for bucket in cut_in_buckets(chunks, 4, 4 * 128)
    ]
    assert ranges == [[2, 3], [0, 1]]
    chunks = chunks_of("buffer", [120, 2, 120], 2)
    buckets = cut_in_buckets(chunks, 4, 4 * 128)
    assert [[r.member for r in b.parts[0].ranges] for b in buckets] == [[2], [0, 1]]


def test_slices_are_in_the_order_of_their_chunks_and_cut_for_as_many_ranks():
    chunks = chunks_of("tensor", [100, 1, *[100] * 6, 1], 3)
    *_, last = cut_in_buckets(chunks, 4, 4 * 100)
    assert [part.index for part in last.parts] == [1, 8]
    assert [len(part.chunk.cuts) for part in last.parts] == [4, 4]
