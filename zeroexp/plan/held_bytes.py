"""Closed form of what rests on a rank of our engine, from layout and stage row.

For evenly cut chunks these are the shares of the published tables. What exists for a moment beside these, and so the
peak, is known by a rehearsal alone (rehearse.py).

[Note: repeated blocks] The blocks of a model are cut alike. So sums over chunks and units run over the different ones
and multiply; a thousand ranks of 7B take a tenth of a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

from zeroexp.comm.shared_memory_sizes import aligned, num_slots, slot_bytes, slot_bytes_of_sums
from zeroexp.comm.traits import TRAITS, TransportTraits
from zeroexp.cut.bucket import Bucket, cut_in_buckets
from zeroexp.cut.chunk import FROZEN, Chunk, Span
from zeroexp.cut.codec_bytes import encoded_chunk
from zeroexp.cut.matrix_step import CutMatrix, exchanges_of
from zeroexp.cut.rank_grid import RankGrid
from zeroexp.cut.stage import Move, Placement, Stage
from zeroexp.measure.record import FILES, HOST, OUTER
from zeroexp.plan.form_terms import ITEMSIZE, ClosedForm, HeldElements
from zeroexp.zero.options import Options

Unit = tuple[Chunk, ...]
Cut = tuple[str, bool, tuple[int, ...], tuple[int, ...]]  # all of a chunk but its parameters' names


class UnitsOfOneShape(NamedTuple):
    """Units of one shape that are gathered equally often, see [Note: repeated blocks]."""

    chunks: Unit  # of the first of them, cut for the ranks of a group
    fine: Unit  # the same, cut for the ranks that update
    num_units: int
    num_gathers: int  # of each, in one step
    buckets: list[tuple[Bucket, Bucket]]  # of each of these


@dataclass(frozen=True)
class EngineHeld(ClosedForm):
    """What rests on each rank, of one model, stage and world size.

    units: the root first, then the others as the model lists them, as `Options.lay_out` cuts them. stage: the row as
    `world_size` ranks carry it out. options: those of the engine, but for the transport. gathers: of each unit in one
    microbatch; None: one for each forward and backward of a unit that is freed between them, else one for both.

    With a secondary copy in each node one gather of a unit in a step goes over all ranks, and the others stay there.
    `place` is the number of a rank in its group, by which chunks are cut.
    """

    units: Sequence[Unit]
    stage: Stage
    options: Options = field(default_factory=Options)
    transport: str = "gloo"  # direct (ranks of one host) | mixed (of several) | gloo | native
    transport_between: str = "gloo"  # that of sums between replicas
    # By it "mixed", which may stand for ranks of several transports, is each rank's own; None: it is that of all.
    ranks_per_node: int | None = None
    gathers: Sequence[int] | None = None
    matrices: Sequence[Sequence[CutMatrix]] = ()
    outer_share: tuple[int, int] = (1, 1)  # outer steps, of so many measured steps

    @property
    def grid(self) -> RankGrid:
        return self.options.grid(self.world_size)

    @property
    def replicas(self) -> int:
        return self.options.replicas

    @property
    def traits(self) -> TransportTraits:
        """How the transport between ranks that shard among themselves carries moves."""
        return TRAITS[self.transport]

    @cached_property
    def resolved(self) -> Options:
        return self.options.resolved(self.stage, self.traits, self.world_size)

    @property
    def _summed(self) -> int:
        """Bytes of one element of what replicas sum: gradients, or the changes of master weights."""
        return self._reduce if self.options.outer is None else self._master

    # -- what is alike ---------------------------------------------------------------------------------

    @cached_property
    def units_by_shape(self) -> list[UnitsOfOneShape]:
        same: dict[tuple[int, tuple[Cut, ...]], list[Unit]] = {}
        for unit, num_gathers in zip(self.units, self._num_gathers, strict=True):
            key = num_gathers, tuple(_cut_without_names(chunk) for chunk in unit)
            same.setdefault(key, []).append(unit)
        most, found = self.resolved.bucket_bytes, list[UnitsOfOneShape]()
        for (num, _), (fine, *others) in same.items():
            chunks = tuple(chunk.for_ranks(self.group_size) for chunk in fine)
            cut = [cut_in_buckets(trainable(each), self._reduce, most) for each in (chunks, fine)]
            buckets = list(zip(*cut, strict=True))
            found.append(UnitsOfOneShape(chunks, fine, 1 + len(others), num, buckets))
        return found

    @cached_property
    def _trained_chunks(self) -> list[tuple[Chunk, int]]:
        """The different trainable chunks and how many there are of each."""
        alike = self.units_by_shape
        return [(chunk, each.num_units) for each in alike for chunk in trainable(each.chunks)]

    @cached_property
    def _num_gathers(self) -> Sequence[int]:
        if self.stage.gather is not Move.ALL_GATHER:
            return [0] * len(self.units)
        uses = self.gathers or [2 - self.is_kept(index) for index in range(len(self.units))]
        return [
            self.accumulation * num if unit else 0
            for num, unit in zip(uses, self.units, strict=True)
        ]

    def is_kept(self, index: int) -> bool:
        """Tell whether a unit stays gathered between forward and backward; the first one is the root."""
        return self.options.keep == "all" or (self.options.keep == "last" and index == 0)

    def _gathered_chunks(self, chunks: Unit) -> tuple[Unit, int]:
        """Return what an all-gather of these chunks moves, and the bytes of one element of it."""
        if (codec := self.options.gather_codec) and chunks:
            return (encoded_chunk(codec, chunks),), 1
        return chunks, self._compute

    def _number(self, rank: int, *, over_all: bool) -> int:
        """Return the number of a rank in the cut by what is updated, see `Collectives.updating`."""
        return self.grid.number_by_place(rank) if over_all else self.grid.place(rank)

    def _own_transport(self, common: str, ranks: Sequence[int], rank: int) -> str:
        """Return the transport of a rank among these, of which "mixed" may stand for several."""
        if common != "mixed" or self.ranks_per_node is None:
            return common
        num_here = [each // self.ranks_per_node for each in ranks].count(
            rank // self.ranks_per_node
        )
        return "direct" if num_here == len(ranks) else "mixed" if num_here > 1 else "gloo"

    # -- bytes held ------------------------------------------------------------------------------------

    def held_elements(self, rank: int, *, on_host: bool = False) -> HeldElements:
        """Return what `rank` holds of all parameters, or of these what rests on the host."""
        place, whole = self.grid.place(rank), self.stage.parameters is not Placement.SHARD
        resting = real = 0
        spans = Counter[tuple[str, int]]()
        pairs = (
            (chunk, fine, each.num_units)
            for each in self.units_by_shape
            for chunk, fine in zip(each.chunks, each.fine, strict=True)
            if chunk.on_host or not on_host
        )
        for chunk, fine, num in pairs:
            resting += num * (chunk.padded_numel if whole else chunk.section_numel(place))
            real += num * (chunk.unpadded_numel if whole else chunk.real_numel(place))
            for span in self._updated_spans(fine, rank):
                spans[chunk.kind, span.numel] += num
        return HeldElements(resting, resting - real, spans)

    def _updated_spans(self, chunk: Chunk, rank: int) -> Sequence[Span]:
        """Return what a rank's optimizer updates of a chunk, which is cut for the ranks that update."""
        if chunk.kind == FROZEN:
            return ()
        if self.stage.optimizer is not Placement.SHARD:
            return chunk.whole()
        return chunk.spans(self._number(rank, over_all=chunk.over_all))

    def held_bytes(self, moment: str, rank: int) -> dict[str, int]:
        held = super().held_bytes(moment, rank)
        held["secondary"] = self._section_bytes(rank, self.options.secondary_partition)
        if self.options.outer is not None:  # weights before the interval, and momentum
            num_tensors = 2 if self.options.outer.momentum else 1
            held[OUTER] = num_tensors * self._master * self.held_elements(rank).owned
        codes = 0
        if self.options.masters_rest:  # pieces are masters, and what is frozen in its own dtype
            place = self.grid.place(rank)
            if self.options.gather_codec:
                codes = self._section_bytes(rank, self.group_size)
            numel = sum(num * chunk.section_numel(place) for chunk, num in self._trained_chunks)
            frozen = self.held_elements(rank).resting - numel
            held["parameters"] = codes + self._compute * frozen
            held["master"] = self._master * numel
        if not (parts := self.options.host_parts):
            return held
        there = self.held_elements(rank, on_host=True)
        owned = there.owned if "master" in parts else 0
        keeps_pieces = self.options.pieces_on_host
        is_cast = self.precision.master != self.precision.compute
        moved = {
            "optimizer": self.optimizer.num_bytes(there, self._master),
            "master": self._master * owned if is_cast else 0,
            "parameters": self._compute * there.resting,
        }
        if self.options.masters_rest:  # masters are the pieces, and codes alone stay on the device
            moved |= {"master": held["master"], "parameters": held["parameters"] - codes}
        transit = owned * max(self._reduce, self._compute * (is_cast and not keeps_pieces))
        # Masters of the parameters' dtype are the pieces, where these are there too.
        apart = 0 if is_cast or keeps_pieces else self._master * owned
        held |= {kind: held[kind] - moved[kind] for kind in parts}
        rests = sum(moved[kind] for kind in parts) + apart
        if self.options.offload_folder:
            counters = self.optimizer.counter_bytes(there)
            return {**held, HOST: transit + counters, FILES: rests - counters}
        return {**held, HOST: transit + rests}

    def _section_bytes(self, rank: int, size: int | None) -> int:
        """Return the bytes of a rank's sections of all that gathers bring, cut for so many ranks; None: it has none."""
        if size is None or self.stage.gather is not Move.ALL_GATHER:
            return 0
        num_bytes = 0
        for unit in self.units_by_shape:
            chunks, itemsize = self._gathered_chunks(unit.chunks)
            numel = sum(chunk.for_ranks(size).section_numel(rank % size) for chunk in chunks)
            num_bytes += unit.num_units * itemsize * numel
        return num_bytes

    def equivalence_key(self, rank: int) -> Hashable:
        traits, place = self.traits, self.grid.place(rank)
        has_uneven_sums = self.replicas > 1 and not traits.is_collective
        if traits.shares_memory or has_uneven_sums or any(map(exchanges_of, self.matrices)):
            return rank  # what peers read of it differs, or which matrices it has whole
        # A piece may lie in other buckets than a piece that is as large.
        buckets = () if self.resolved.bucket_bytes is None else self._chunks_of_buckets
        pairs = [*((each.chunks, each.fine) for each in self.units_by_shape), *buckets]
        cuts = [(chunk, place) for chunks, _ in pairs for chunk in chunks]
        cuts += [
            (own, self._number(rank, over_all=own.over_all)) for _, fine in pairs for own in fine
        ]
        return self._section_bytes(rank, self.options.secondary_partition), *(
            (cut.section_numel(at), cut.real_numel(at), len(cut.spans(at))) for cut, at in cuts
        )

    @cached_property
    def _chunks_of_buckets(self) -> list[tuple[Unit, ...]]:
        """The chunks of each bucket, cut for the ranks of a group, and for those that update."""
        pairs = [pair for each in self.units_by_shape for pair in each.buckets]
        return [tuple(tuple(p.chunk for p in each.parts) for each in pair) for pair in pairs]

    @cached_property
    def _num_trainable(self) -> int:
        return sum(num * chunk.unpadded_numel for chunk, num in self._trained_chunks)

    def _gradient_bytes(self, moment: str, rank: int) -> int:
        if moment == "after_forward" and self.resolved.reduce_each == "step":
            # Autograd adds them up in the wider dtype.
            return self._num_trainable * max(self._compute, self._reduce)
        if self.stage.gradients is not Placement.SHARD:  # sums of what rests partial lie in it
            return self._reduce * self._num_trainable
        place = self.grid.place(rank)
        of_chunks = (num * chunk.real_numel(place) for chunk, num in self._trained_chunks)
        return self._reduce * sum(of_chunks)

    def _buffer_bytes(self, moment: str, rank: int) -> int:
        """Return the bytes of units that are kept gathered, of residuals, and of memory shared with peers."""
        gathers = self.stage.gather is Move.ALL_GATHER
        kept = self._kept_bytes if gathers and moment == "after_forward" else 0
        shared = self._staging_bytes(rank) if self.world_size > 1 else 0
        return kept + shared + self._residual_bytes(self.grid.place(rank))

    def _residual_bytes(self, place: int) -> int:
        """Return the bytes of what the codes of gradients leave out, of all elements that other ranks sum."""
        if not self.options.error_feedback or self.stage.summing_move is not Move.REDUCE_SCATTER:
            return 0
        return ITEMSIZE["float32"] * sum(
            num * (chunk.unpadded_numel - chunk.real_numel(place))
            for chunk, num in self._trained_chunks
        )

    @cached_property
    def _kept_bytes(self) -> int:
        """Bytes of the units that stay gathered between forward and backward."""
        return sum(
            aligned(chunk.padded_numel * self._compute)
            for index, unit in enumerate(self.units)
            if self.is_kept(index)
            for chunk in unit
        )

    @cached_property
    def _staging_bytes(self) -> Callable[[int], int]:
        """Bytes of the memory that a rank shares with peers, counted once: it takes most of a plan of CPU ranks."""

        def staging_bytes(rank: int) -> int:
            units = [trainable(alike.chunks) for alike in self.units_by_shape]
            itemsize, most = self._reduce, self.resolved.bucket_bytes
            replica, place = self.grid.group_number(rank), self.grid.place(rank)
            inside = self._own_transport(self.transport, self.grid.group(rank), rank)
            between = self._own_transport(self.transport_between, self.grid.holders(rank), rank)
            slots = 0
            if TRAITS[inside].shares_memory and self.group_size > 1:
                slots = num_slots(inside) * slot_bytes(units, self.stage, place, itemsize, most)
            if TRAITS[between].shares_memory and self.replicas > 1:
                place_and_replica = (place, replica)
                slots += num_slots(between) * slot_bytes_of_sums(
                    *(units, place_and_replica, self.replicas, (itemsize, self._summed), most)
                )
            return slots

        return cache(staging_bytes)


def trainable(unit: Unit) -> Unit:
    return tuple(chunk for chunk in unit if chunk.kind != FROZEN)


def _cut_without_names(chunk: Chunk) -> Cut:
    return chunk.kind, chunk.on_host, chunk.cuts, tuple(member.stop for member in chunk.members)
