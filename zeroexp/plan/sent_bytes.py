"""Closed form of what a step of our engine sends, from layout and stage row.

    form = EngineForm(units, stage, world_size=8)
    form.traffic(rank=3)                          what `Collectives` counts in one step, by kind
    form.held_bytes("after_backward", rank=3)     what `Strategy.model_states` returns at that moment (held_bytes.py)

For evenly cut chunks and the plain schedule (nothing kept, one microbatch) the bytes are
those of the table in README.md times (N-1)/N: 2P, or 3P for zero3 and zero1_allreduce.

[Note: one step] The form describes a step in the middle of a run: it gathers ahead as much for the next step as the
step before gathered for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroexp.comm.collective_layout import collective_layout_of
from zeroexp.comm.shared_memory_sizes import sums_of
from zeroexp.cut.bucket import Bucket
from zeroexp.cut.chunk import Chunk
from zeroexp.cut.codec_bytes import encoded_bytes
from zeroexp.cut.matrix_step import exchanges_of
from zeroexp.cut.stage import Move
from zeroexp.measure.record import Traffic
from zeroexp.plan.held_bytes import EngineHeld, Unit, trainable

# Size of each number that ranks sum before a step (step_sums.py): the sum of squares, and one for each parameter.
TALLY_BYTES = 8
NUM_CHECKS = 5  # summed numbers that tell whether ranks issued the same gathers (native only)


@dataclass(frozen=True)
class EngineForm(EngineHeld):
    """The traffic and memory of one model, stage and world size."""

    def traffic(self, rank: int) -> Traffic:
        traffic = Traffic()
        place = self.grid.place(rank)
        for chunks, fine, num_units, num_gathers, buckets in self.units_by_shape:
            num_over_all = min(num_gathers, 1) if self.options.secondary_partition else num_gathers
            gathered = self._gather_bytes(chunks, place) if num_gathers else 0
            _add(traffic, "gather", num_units * num_over_all, gathered)
            if num_in_node := num_gathers - num_over_all:
                kept = self._gather_bytes(chunks, rank, self.options.secondary_partition)
                _add(traffic, "secondary", num_units * num_in_node, kept)
            if not trainable(chunks):
                continue
            if shared := [chunk for chunk in trainable(fine) if chunk.over_all]:
                own = self._share_bytes(shared, rank, self._compute)[1]
                _add(traffic, "replicas", num_units, (self.replicas - 1) * own)
            for bucket, fine_bucket in buckets:
                chunks_of_bucket = [part.chunk for part in bucket.parts]
                num_bytes = self._reduction_bytes(chunks_of_bucket, place)
                _add(traffic, "reduce", num_units * self._num_reductions, num_bytes)
                for between in self._sum_bytes(bucket, fine_bucket, rank):
                    _add(traffic, "replicas", num_units * self._num_sums_between, between)
            if self.stage.publish is Move.ALL_GATHER:
                published = self._gather_bytes(trainable(chunks), place)
                _add(traffic, "publish", num_units, published)
        if num_exchanges := sum(map(exchanges_of, self.matrices)):
            traffic.calls_by_kind["matrices"] = num_exchanges
            traffic.bytes_by_kind["matrices"] = sum(
                num_bytes[self._number(rank, over_all=over_all)]
                for over_all, num_bytes in self._matrix_bytes.items()
            )
        if self.options.outer is not None:
            _times(traffic, "replicas", *self.outer_share)
        # Ranks that step together.
        size = self.world_size if self.options.outer is None else self.group_size
        if size > 1:
            compares = self.traits.is_collective and self.stage.gather is Move.ALL_GATHER
            num_checks = NUM_CHECKS if compares else 0
            num_parameters = sum(num * len(chunk.members) for chunk, num in self._trained_chunks)
            num_bytes = TALLY_BYTES * (1 + num_parameters + num_checks)
            _add(traffic, "norm", 1, 2 * num_bytes * (size - 1) // size)
        if self.options.offload:
            owned = self.held_elements(rank, on_host=True).owned
            elements = self._gathered_pieces(place) if self.options.pieces_on_host else owned
            codes = self._section_bytes(rank, self.group_size)
            to_device = codes if self.options.masters_rest else self._compute * elements
            ways = {"to_host": self._reduce * owned, "to_device": to_device}
            traffic.bus_bytes = {way: size for way, size in ways.items() if size}
        return traffic

    def _gathered_pieces(self, place: int) -> int:
        """Return the elements of a rank's own pieces on the host, padding included, as often as a step gathers them."""
        return sum(
            alike.num_units * alike.num_gathers * chunk.section_numel(place)
            for alike in self.units_by_shape
            for chunk in alike.chunks
            if chunk.on_host
        )

    def _gather_bytes(self, chunks: Unit, rank: int, num_ranks: int | None = None) -> int:
        """Return the bytes a rank sends in an all-gather of its group, or of its node of so many: its part, to all."""
        size = num_ranks or self.group_size
        moved, itemsize = self._gathered_chunks(chunks)
        cut = [chunk.for_ranks(size) for chunk in moved]
        _, own = self._moved_numel(cut, rank % size, itemsize)
        return (size - 1) * own * itemsize

    def _reduction_bytes(self, chunks: Sequence[Chunk], place: int) -> int:
        """Return the bytes a rank sends in a reduction: each peer gets the terms that it sums."""
        if codec := self.options.reduce_codec:
            peers = (rank for rank in range(self.group_size) if rank != place)
            terms = (sum(chunk.real_numel(rank) for chunk in chunks) for rank in peers)
            return sum(encoded_bytes(codec, numel) for numel in terms)
        if self.stage.summing_move is Move.ALL_REDUCE:
            total = sum(chunk.unpadded_numel for chunk in chunks)
            own = sum(chunk.real_numel(place) for chunk in chunks)
            return self._all_reduce_bytes(total, own, self.group_size, self._reduce)
        total, own = self._moved_numel(chunks, place, self._reduce)
        return (total - own) * self._reduce

    def _all_reduce_bytes(self, total: int, own: int, num_ranks: int, itemsize: int) -> int:
        """Return the bytes a rank sends in an all-reduce of so many elements, of which it sums its own.

        In the backend's ring every rank sends as much. Else each peer gets its terms, and this rank's sums.
        """
        if self.traits.is_collective:
            return 2 * total * itemsize * (num_ranks - 1) // num_ranks
        return (total - own + (num_ranks - 1) * own) * itemsize

    def _sum_bytes(self, bucket: Bucket, fine: Bucket, rank: int) -> Iterator[int]:
        """Yield the bytes a rank sends to sum between replicas what it has summed of this bucket, and what it owns."""
        shared = [p.chunk for p in fine.parts if p.chunk.over_all]
        if self.replicas == 1:
            return
        if self.stage.summing_move is not Move.REDUCE_SCATTER or not shared:
            yield self._bytes_of_sums(bucket, rank)
            return
        if others := tuple(each for each in bucket.parts if not each.chunk.over_all):
            yield self._bytes_of_sums(Bucket(others), rank)
        total, own = self._share_bytes(shared, rank, self._reduce)
        yield total - own

    def _bytes_of_sums(self, bucket: Bucket, rank: int) -> int:
        replica, place = self.grid.group_number(rank), self.grid.place(rank)
        chunk = sums_of(bucket, place, self.replicas)
        own = chunk.real_numel(replica)
        return self._all_reduce_bytes(chunk.unpadded_numel, own, self.replicas, self._summed)

    def _share_bytes(self, fine: Sequence[Chunk], rank: int, itemsize: int) -> tuple[int, int]:
        """Return the bytes of what holders of these chunks' pieces cut among them, and of this rank's share."""
        replica, place = self.grid.group_number(rank), self.grid.place(rank)
        shares = [chunk.within(place, self.group_size) for chunk in fine]
        total, own = self._moved_numel(shares, replica, itemsize)
        return total * itemsize, own * itemsize

    @cached_property
    def _matrix_bytes(self) -> dict[bool, list[int]]:
        """The bytes that each rank sends of matrices, by its number, to where they are whole and back.

        Key: whether they are cut over all ranks.
        """
        sent_by = {True: [0] * self.world_size, False: [0] * self.group_size}
        for matrix in (matrix for batch in self.matrices for matrix in batch if matrix.is_cut):
            sent = sent_by[matrix.over_all]
            owner = matrix.whole_on[0]
            for place in matrix.pieces:
                num_others = len(matrix.whole_on) - (place in matrix.whole_on)
                sent[place] += num_others * matrix.piece_bytes(place)
                sent[owner] += matrix.bytes_back(owner, place)
        return sent_by

    def _moved_numel(self, chunks: Sequence[Chunk], place: int, itemsize: int) -> tuple[int, int]:
        """Return the elements of a move of these chunks, and of a rank's part; only the backend sends padding."""
        if self.traits.is_collective:
            layout = collective_layout_of(tuple(chunks), itemsize)
            return layout.numel, layout.part_numel(place)
        own = sum(chunk.real_numel(place) for chunk in chunks)
        return sum(chunk.unpadded_numel for chunk in chunks), own

    @property
    def _num_reductions(self) -> int:
        if self.group_size == 1:
            return 0
        return self.accumulation if self.resolved.reduce_each == "microbatch" else 1

    @property
    def _num_sums_between(self) -> int:
        """Sums between replicas of one bucket in a step: what rests sharded is summed in the last microbatch."""
        each = self.stage.summing_move is Move.ALL_REDUCE and self.options.outer is None
        return self._num_reductions if each else 1


def _times(traffic: Traffic, kind: str, num: int, of: int) -> None:
    """Count collectives that happen in `num` of so many steps: the mean of a step."""
    for sums in (traffic.bytes_by_kind, traffic.calls_by_kind):
        if kind in sums:
            total = sums[kind] * num
            sums[kind] = total // of if total % of == 0 else total / of  # pyright: ignore[reportArgumentType]


def _add(traffic: Traffic, kind: str, calls: int, num_bytes: int) -> None:
    """Add `calls` collectives of `num_bytes` each; a kind without collectives gets no entry."""
    if calls:
        sums, counts = traffic.bytes_by_kind, traffic.calls_by_kind
        sums[kind] = sums.get(kind, 0) + calls * num_bytes
        counts[kind] = counts.get(kind, 0) + calls
