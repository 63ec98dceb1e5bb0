"""Bytes of shared memory that a rank of one host needs: what rests there, and slots for reductions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from zeroexp.comm.traits import TRAITS
from zeroexp.cut.bucket import Bucket, cut_in_buckets
from zeroexp.cut.chunk import Chunk, ParameterSpec
from zeroexp.cut.layout import by_buffer
from zeroexp.cut.stage import STAGES, Move, Stage

ALIGNMENT_BYTES = 64  # of tensors that lie side by side in one memory


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def num_slots(transport: str) -> int:
    """Return how many reductions may lie in a rank's shared memory at once: one more than may be in flight.

    With fewer slots neighbours would wait for each other forever, since a rank reads a reduction only when it has
    launched as many more as may be in flight.
    """
    return TRAITS[transport].reductions_in_flight + 1


def arena_bytes(resting: Sequence[int], slot_bytes: int, num_slots: int) -> int:
    """Return the bytes of a rank's shared memory: resting tensors, each aligned, and slots."""
    return max(sum(map(aligned, resting)) + num_slots * slot_bytes, ALIGNMENT_BYTES)


def slot_bytes(
    units: Iterable[Sequence[Chunk]],
    stage: Stage,
    rank: int,
    itemsize: int,
    bucket_bytes: int | None = None,
) -> int:
    """Return the most bytes that one reduction of `rank` lays out for others to read.

    units: the trainable chunks of each unit.
    """
    handed = (
        _handed_bytes([part.chunk for part in bucket.parts], stage, rank, itemsize)
        for chunks in units
        for bucket in cut_in_buckets(chunks, itemsize, bucket_bytes)
    )
    return aligned(max(handed, default=0))


def slot_bytes_of_sums(
    units: Iterable[Sequence[Chunk]],
    ranks: tuple[int, int],
    num_replicas: int,
    itemsizes: tuple[int, int],
    bucket_bytes: int | None = None,
) -> int:
    """Return the most bytes that one sum between replicas lays out for others to read.

    ranks: this rank's place in its group, and its number among those of that place. itemsizes: of reductions, by which
    buckets are cut, and of the sums.
    """
    (place, replica), (itemsize, of_sums) = ranks, itemsizes
    handed = (
        _handed_bytes([sums_of(bucket, place, num_replicas)], STAGES["ddp"], replica, of_sums)
        for chunks in units
        for bucket in cut_in_buckets(chunks, itemsize, bucket_bytes)
    )
    return aligned(max(handed, default=0))


def sums_of(bucket: Bucket, place: int, num_replicas: int) -> Chunk:
    """Return what a rank has to sum between replicas after the reduction of this bucket inside of its group."""
    sizes = [span.numel for part in bucket.parts for span in part.chunk.spans(place)]
    return chunk_of_sums(tuple(sizes), num_replicas)


@lru_cache(maxsize=4096)
def chunk_of_sums(sizes: tuple[int, ...], num_replicas: int) -> Chunk:
    """Return a rank's sums, flat tensors of these sizes, as a chunk that is cut evenly over replicas."""
    specs = [ParameterSpec(str(i), numel, itemsize=1) for i, numel in enumerate(sizes or (0,))]
    return by_buffer(specs, num_replicas)[0]


def _handed_bytes(chunks: Sequence[Chunk], stage: Stage, rank: int, itemsize: int) -> int:
    """Return the bytes that one reduction of these chunks lays out for others; every span is aligned."""
    num_bytes = 0
    for chunk in chunks:
        size = len(chunk.cuts) - 1
        spans = [sum(aligned(s.numel * itemsize) for s in chunk.spans(r)) for r in range(size)]
        handed_out = (size - 1) * spans[rank] if stage.reduce is Move.ALL_REDUCE else 0
        num_bytes += max(sum(spans) - spans[rank], handed_out)
    return num_bytes
