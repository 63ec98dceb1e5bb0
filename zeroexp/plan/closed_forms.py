"""Closed forms of what rests on a rank and what a step sends, from layout and stage row.

    form = EngineForm(units, stage, world_size=8)
    form.traffic(rank=3)                          what `Collectives` counts in one step, by kind
    form.held_bytes("after_backward", rank=3)     what `Strategy.model_states` returns at that moment, by kind

For evenly cut chunks and the plain schedule (nothing kept, one microbatch) the bytes are
those of the table in README.md times (N-1)/N: 2P, or 3P for zero3 and zero1_allreduce. What exists for a moment beside
these, and so the peak, is known by a rehearsal alone (rehearse.py).

[Note: repeated blocks] The blocks of a model are cut alike. So sums over chunks and units run over the different ones
and multiply; a thousand ranks of 7B take a tenth of a second.

[Note: one step] The forms describe a step in the middle of a run: it gathers ahead as much for the next step as the
step before gathered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import ClassVar, NamedTuple

from zeroexp.comm.collective_layout import collective_layout_of
from zeroexp.comm.shared_memory_sizes import (
    aligned,
    num_slots,
    slot_bytes,
    slot_bytes_of_sums,
    sums_of,
)
from zeroexp.comm.traits import TRAITS, TransportTraits
from zeroexp.cut.bucket import Bucket, cut_in_buckets
from zeroexp.cut.chunk import FROZEN, Chunk, Span
from zeroexp.cut.codec_bytes import encoded_bytes, encoded_chunk
from zeroexp.cut.matrix_step import CutMatrix, exchanges_of
from zeroexp.cut.rank_grid import RankGrid
from zeroexp.cut.stage import Move, Placement, Stage
from zeroexp.measure.record import FILES, HOST, MOMENTS, OUTER, Traffic
from zeroexp.plan.form_terms import (
    ITEMSIZE,
    HeldElements,
    OptimizerForm,
    PrecisionForm,
    owned_of,
)
from zeroexp.zero.options import Options

# Size of each number that ranks sum before a step (step_sums.py): the sum of squares, and one for each parameter.
TALLY_BYTES = 8
NUM_CHECKS = 5  # summed numbers that tell whether ranks issued the same gathers (native only)

Unit = tuple[Chunk, ...]
Cut = tuple[str, bool, tuple[int, ...], tuple[int, ...]]  # all of a chunk but its parameters' names


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """What rests on each rank of any engine, from what a subclass says of its elements, gradients and buffers.

    at_rest: which dtype of the precision a parameter has. Moments have the master's, and so have master weights, which
    are others than the parameters where the dtypes differ, or where `copies_weights`.
    """

    world_size: int
    accumulation: int = 1  # microbatches in a step
    precision: PrecisionForm = field(default_factory=PrecisionForm)
    optimizer: OptimizerForm = field(default_factory=OptimizerForm)
    shares_updates = False  # whether the optimizer's state of some chunks is cut over all of them
    copies_weights = False
    at_rest: ClassVar[str] = "compute"

    def traffic(self, rank: int) -> Traffic:
        """Return the bytes `rank` sends in one step and the number of its collectives, by kind."""
        raise NotImplementedError

    def held_elements(self, rank: int) -> HeldElements:
        """Return what `rank` holds of all parameters."""
        raise NotImplementedError

    def _gradient_bytes(self, moment: str, rank: int) -> int:
        raise NotImplementedError

    def _buffer_bytes(self, moment: str, rank: int) -> int:
        raise NotImplementedError

    def held_bytes(self, moment: str, rank: int) -> dict[str, int]:
        """Return the bytes of model states on `rank` at one of MOMENTS of a step's last microbatch, by kind.

        This assumes that every trainable parameter has got a gradient.
        """
        assert moment in MOMENTS, moment
        held = self.held_elements(rank)
        at_rest = 0 if self.copies_weights else self.parameter_itemsize
        return {
            "parameters": self.parameter_itemsize * held.resting,
            "gradients": self._gradient_bytes(moment, rank) if self._has_gradients(moment) else 0,
            "optimizer": self.optimizer.num_bytes(held, self._master),
            "master": self.optimizer.master_bytes(held, self._master, at_rest),
            "secondary": 0,
            "buffers": self._buffer_bytes(moment, rank),
        }

    def padding_bytes(self, rank: int) -> int:
        """Return the bytes of padding among the parameters at rest."""
        return self.parameter_itemsize * self.held_elements(rank).padding

    def _has_gradients(self, moment: str) -> bool:
        between = moment == "after_forward" and self.accumulation > 1
        return between or moment in ("after_backward", "after_step")

    def equivalence_key(self, rank: int) -> Hashable:
        """Return a key that is equal for ranks that hold and send as much."""
        return self.held_elements(rank)

    @property
    def parameter_itemsize(self) -> int:
        """Bytes of one element of a parameter at rest."""
        return ITEMSIZE[getattr(self.precision, self.at_rest)]

    @property
    def grid(self) -> RankGrid:
        return RankGrid(self.world_size)

    @property
    def group_size(self) -> int:
        """Ranks that shard among themselves."""
        return self.grid.group_size

    @property
    def _compute(self) -> int:
        """Bytes of one element in the dtype of computation."""
        return ITEMSIZE[self.precision.compute]

    @property
    def _reduce(self) -> int:
        return ITEMSIZE[self.precision.reduce]

    @property
    def _master(self) -> int:
        return ITEMSIZE[self.precision.master]


class UnitsOfOneShape(NamedTuple):
    """Units of one shape that are gathered equally often, see [Note: repeated blocks]."""

    chunks: Unit  # of the first of them, cut for the ranks of a group
    fine: Unit  # the same, cut for the ranks that update
    num_units: int
    num_gathers: int  # of each, in one step
    buckets: list[tuple[Bucket, Bucket]]  # of each of these


@dataclass(frozen=True)
class EngineForm(ClosedForm):
    """The traffic and memory of one model, stage and world size.

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
    def shares_updates(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.options.shares_updates

    def _own_transport(self, common: str, ranks: Sequence[int], rank: int) -> str:
        """Return the transport of a rank among these, of which "mixed" may stand for several."""
        if common != "mixed" or self.ranks_per_node is None:
            return common
        num_here = [each // self.ranks_per_node for each in ranks].count(
            rank // self.ranks_per_node
        )
        return "direct" if num_here == len(ranks) else "mixed" if num_here > 1 else "gloo"

    @property
    def traits(self) -> TransportTraits:
        """How the transport between ranks that shard among themselves carries moves."""
        return TRAITS[self.transport]

    @cached_property
    def resolved(self) -> Options:
        return self.options.resolved(self.stage, self.traits, self.world_size)

    # -- bytes sent --------------------------------------------------------------------------------

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

    def _gathered_chunks(self, chunks: Unit) -> tuple[Unit, int]:
        """Return what an all-gather of these chunks moves, and the bytes of one element of it."""
        if (codec := self.options.gather_codec) and chunks:
            return (encoded_chunk(codec, chunks),), 1
        return chunks, self._compute

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

    def _number(self, rank: int, *, over_all: bool) -> int:
        """Return the number of a rank in the cut by what is updated, see `Collectives.updating`."""
        return self.grid.number_by_place(rank) if over_all else self.grid.place(rank)

    @property
    def _summed(self) -> int:
        """Bytes of one element of what replicas sum: gradients, or the changes of master weights."""
        return self._reduce if self.options.outer is None else self._master

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

    # -- how often ---------------------------------------------------------------------------------

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

    # -- what is alike -----------------------------------------------------------------------------

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

    # -- bytes held --------------------------------------------------------------------------------

    def held_elements(self, rank: int, *, on_host: bool = False) -> HeldElements:
        """Return what `rank` holds of all parameters, or of these what rests on the host."""
        place = self.grid.place(rank)
        parts = [
            (self._held_of_chunk(chunk, place, fine.spans(at)), each.num_units)
            for each in self.units_by_shape
            for chunk, fine in zip(each.chunks, each.fine, strict=True)
            for at in [self._number(rank, over_all=fine.over_all)]
            if chunk.on_host or not on_host
        ]
        owned = tuple(own.times(num) for held, num in parts for own in held.parts)
        resting = sum(num * held.resting for held, num in parts)
        padding = sum(num * held.padding for held, num in parts)
        return HeldElements(resting, padding, owned)

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
        if self.options.offload is None:
            return held
        there = self.held_elements(rank, on_host=True)
        if self.options.masters_rest:  # pieces are on the host, and masters are the pieces
            on_host = held["parameters"] - codes + held["master"] + self._reduce * there.owned
            on_host += held["optimizer"]
            return {**held, "optimizer": 0, "master": 0, "parameters": codes, HOST: on_host}
        keeps_pieces = self.options.pieces_on_host
        is_cast = self.precision.master != self.precision.compute
        moved = {
            "optimizer": self.optimizer.num_bytes(there, self._master),
            "master": self._master * there.owned if is_cast else 0,
            "parameters": self._compute * there.resting if keeps_pieces else 0,
        }
        transit = there.owned * max(self._reduce, self._compute * (is_cast and not keeps_pieces))
        # Masters of the parameters' dtype are the pieces, where these are there too.
        apart = 0 if is_cast or keeps_pieces else self._master * there.owned
        held |= {kind: held[kind] - num_bytes for kind, num_bytes in moved.items()}
        rests = sum(moved.values()) + apart
        if self.options.offload_folder:
            return {**held, HOST: transit, FILES: rests}
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

    def _held_of_chunk(self, chunk: Chunk, place: int, spans: Sequence[Span]) -> HeldElements:
        """Return what the rank at a place holds of a chunk, of which its optimizer, where it is cut, has `spans`."""
        whole = self.stage.parameters is not Placement.SHARD
        resting = chunk.padded_numel if whole else chunk.section_numel(place)
        real = chunk.unpadded_numel if whole else chunk.real_numel(place)
        if chunk.kind == FROZEN:
            return HeldElements(resting, resting - real, ())
        sharded = self.stage.optimizer is Placement.SHARD
        spans = spans if sharded else chunk.whole()
        owned = owned_of(chunk.kind, [span.numel for span in spans])
        return HeldElements(resting, resting - real, (owned,))

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
