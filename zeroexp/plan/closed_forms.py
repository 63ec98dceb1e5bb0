"""Closed forms of what a step sends and what a rank holds, from layout, stage row and schedule.

    form = ShardedForm(units, stage, world_size=8)
    form.traffic(rank=3)                          what `Collectives` counts in one step, by kind
    form.held_bytes("after_backward", rank=3)     what `Strategy.model_states` returns at that moment, by kind

The arithmetic uses no torch. For evenly cut chunks and the plain schedule (nothing kept, one microbatch) the bytes are
those of the table in README.md times (N-1)/N: 2P, or 3P for zero3 and zero1_allreduce.

[Note: repeated blocks] The blocks of a model are cut alike. So sums over chunks and units run over the different ones
and multiply; a thousand ranks of 7B take a tenth of a second.

[Note: one step] The forms describe a step in the middle of a run: it gathers ahead as much for the next step as the
step before gathered for it. How often it gathers each unit is counted in gather_counts.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zeroexp.comm.facts import TRANSPORTS, Facts
from zeroexp.comm.paging import aligned
from zeroexp.comm.sizes import mapped_bytes, num_slots, slot_bytes
from zeroexp.cut.bucket import Bucket, cut_in_buckets
from zeroexp.cut.chunk import Chunk
from zeroexp.cut.stage import Move, Placement, Stage
from zeroexp.measure.record import MOMENTS, Traffic
from zeroexp.plan.gather_counts import Use, gathers_of_step, listed_order, most_beside_pools

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Size of each number that ranks sum before a step (gradient_norm.py): the sum of squares, and one for each parameter.
TALLY_BYTES = 8
FROZEN = "frozen"  # the kind of chunks that get no gradient
NUM_CHECKS = 5  # summed numbers that tell whether ranks issued the same gathers (native only)


Cut = tuple[str, tuple[int, ...], tuple[int, ...]]  # all of a chunk but its parameters' names


@dataclass(frozen=True)
class UnitForm:
    """The chunks of one unit. A `private` unit has its own memory while it is gathered, see pool_assignment.py."""

    chunks: tuple[Chunk, ...]
    private: bool = False

    @property
    def trainable(self) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.kind != FROZEN)


@dataclass(frozen=True)
class ScheduleForm:
    """The settings that decide how often a unit moves: the engine's `Options`, with every default filled in."""

    accumulation: int = 1  # microbatches in a step
    keep: str = "last"  # none | last | all
    num_pools: int = 2  # 1 + number of units gathered ahead
    reduce_each: str = "step"  # microbatch | step
    bucket_bytes: int | None = None  # the most bytes of one reduction; None: a whole unit
    transport: str = "gloo"  # direct (ranks of one host) | mixed (of several) | gloo | native
    overlap: bool = True  # reductions travel beside backward

    @property
    def facts(self) -> Facts:
        return TRANSPORTS[self.transport]


@dataclass(frozen=True)
class PrecisionForm:
    compute: str = "float32"
    reduce: str = "float32"
    master: str = "float32"


@dataclass(frozen=True)
class OptimizerForm:
    """The optimizer's state: AdamW keeps two moments and a 4-byte step per tensor, SGD with momentum one moment."""

    num_moments: int = 2  # each as large as its master weight, in the master's dtype
    bytes_per_tensor: int = 4


class HeldElements(NamedTuple):
    """These are the elements of all chunks that one rank holds; padding is part of no owned span."""

    resting: int  # parameters at rest, padding included
    padding: int  # the part of `resting` that is padding
    owned: int  # elements that the optimizer updates
    num_owned: int  # spans that the optimizer updates, each a tensor


class UnitsOfOneShape(NamedTuple):
    """Units of one shape that are gathered equally often, see [Note: repeated blocks]."""

    unit: UnitForm  # the first of them
    num_units: int
    num_gathers: int  # of each, in one step
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class ShardedForm:
    """The traffic and memory of one model, stage and world size.

    units: the root first, then the others as the model lists them. stage: the row as `world_size` ranks carry it out.
    uses: of units in one microbatch; None: units run in the order in which they are listed.
    """

    units: Sequence[UnitForm]
    stage: Stage
    world_size: int
    schedule: ScheduleForm = ScheduleForm()
    precision: PrecisionForm = PrecisionForm()
    optimizer: OptimizerForm = OptimizerForm()
    uses: Sequence[Use] | None = None

    # -- bytes sent --------------------------------------------------------------------------------

    def traffic(self, rank: int) -> Traffic:
        """Return the bytes `rank` sends in one step and the number of its collectives, by kind."""
        traffic = Traffic()
        compute, reduce = ITEMSIZE[self.precision.compute], ITEMSIZE[self.precision.reduce]
        for unit, num_units, num_gathers, buckets in self.units_by_shape:
            gathered = self._gather_bytes(unit.chunks, rank, compute) if num_gathers else 0
            _add(traffic, "gather", num_units * num_gathers, gathered)
            if not unit.trainable:
                continue
            for bucket in buckets:
                num_bytes = self._reduction_bytes(
                    [part.chunk for part in bucket.slices], rank, reduce
                )
                _add(traffic, "reduce", num_units * self._num_reductions, num_bytes)
            if self.stage.publish is Move.ALL_GATHER:
                _add(
                    traffic, "publish", num_units, self._gather_bytes(unit.trainable, rank, compute)
                )
        if self.world_size > 1:
            compared = self.schedule.facts.is_collective
            num_checks = NUM_CHECKS if compared and self.stage.gather is Move.ALL_GATHER else 0
            num_parameters = sum(
                num * len(chunk.members) for chunk, num in self._chunks if chunk.kind != FROZEN
            )
            num_bytes = TALLY_BYTES * (1 + num_parameters + num_checks)
            _add(traffic, "norm", 1, 2 * num_bytes * (self.world_size - 1) // self.world_size)
        return traffic

    def _gather_bytes(self, chunks: Sequence[Chunk], rank: int, itemsize: int) -> int:
        """Return the bytes `rank` sends in an all-gather: its section, to every peer."""
        own = sum(self._section_numel(chunk, rank) for chunk in chunks)
        return (self.world_size - 1) * own * itemsize

    def _reduction_bytes(self, chunks: Sequence[Chunk], rank: int, itemsize: int) -> int:
        """Return the bytes `rank` sends in a reduction.

        Each peer gets the terms that it sums; in an all-reduce it also gets the sums of `rank`.
        """
        own = sum(self._section_numel(chunk, rank) for chunk in chunks)
        total = sum(self.moved_numel(chunk) for chunk in chunks)
        if self.reduction is not Move.ALL_REDUCE:
            return (total - own) * itemsize
        if self.schedule.facts.is_collective:
            # In the backend's ring every rank sends as much, without padding.
            total = sum(chunk.unpadded_numel for chunk in chunks)
            return 2 * total * itemsize * (self.world_size - 1) // self.world_size
        return (total - own) * itemsize + self._gather_bytes(chunks, rank, itemsize)

    def moved_numel(self, chunk: Chunk) -> int:
        """Return the elements of a chunk that travel; only the backend's collectives send padding."""
        return chunk.padded_numel if self.schedule.facts.is_collective else chunk.unpadded_numel

    def _section_numel(self, chunk: Chunk, rank: int) -> int:
        padded = self.schedule.facts.is_collective
        return _length(chunk.section(rank) if padded else chunk.real_section(rank))

    # -- how often ---------------------------------------------------------------------------------

    @property
    def reduction(self) -> Move:
        """The move that takes partial gradients to where the optimizer needs them."""
        return self.stage.reduce if self.stage.reduce is not Move.NOTHING else self.stage.hand_over

    @property
    def _num_reductions(self) -> int:
        return self.schedule.accumulation if self.schedule.reduce_each == "microbatch" else 1

    @cached_property
    def _num_gathers(self) -> list[int]:
        """Gathers of each unit in one step."""
        if self.stage.gather is not Move.ALL_GATHER:
            return [0] * len(self.units)
        keep, accumulation = self.schedule.keep, self.schedule.accumulation
        counts = gathers_of_step(
            self._uses, self._units_of_pools, keep=keep, accumulation=accumulation
        )
        return [counts[index] if unit.chunks else 0 for index, unit in enumerate(self.units)]

    @cached_property
    def _uses(self) -> Sequence[Use]:
        return listed_order(len(self.units)) if self.uses is None else self.uses

    @property
    def _units_of_pools(self) -> list[list[int]]:
        """For each pool, the indices of the units that take turns in it."""
        sharing = [index for index, unit in enumerate(self.units) if not unit.private]
        return [sharing[i :: self.schedule.num_pools] for i in range(self.schedule.num_pools)]

    # -- what is alike -----------------------------------------------------------------------------

    @cached_property
    def units_by_shape(self) -> list[UnitsOfOneShape]:
        """All units, those of one shape together."""
        same: dict[tuple[int, tuple[Cut, ...]], list[UnitForm]] = {}
        for unit, num_gathers in zip(self.units, self._num_gathers, strict=True):
            key = num_gathers, tuple(_cut_without_names(chunk) for chunk in unit.chunks)
            same.setdefault(key, []).append(unit)
        reduce, most = ITEMSIZE[self.precision.reduce], self.schedule.bucket_bytes
        return [
            UnitsOfOneShape(
                units[0], len(units), num, cut_in_buckets(units[0].trainable, reduce, most)
            )
            for (num, _), units in same.items()
        ]

    @cached_property
    def _chunks(self) -> list[tuple[Chunk, int]]:
        """The different chunks and how many there are of each."""
        same: dict[Cut, list[Chunk]] = {}
        for unit in self.units:
            for chunk in unit.chunks:
                same.setdefault(_cut_without_names(chunk), []).append(chunk)
        return [(chunks[0], len(chunks)) for chunks in same.values()]

    # -- bytes held --------------------------------------------------------------------------------

    def held_bytes(self, moment: str, rank: int) -> dict[str, int]:
        """Return the bytes of model states on `rank` at one of MOMENTS of a step's last microbatch, by kind.

        This assumes that every trainable parameter has got a gradient.
        """
        assert moment in MOMENTS, moment
        compute, master = ITEMSIZE[self.precision.compute], ITEMSIZE[self.precision.master]
        held = self.held_elements(rank)
        has_master = self.precision.master != self.precision.compute
        moments = self.optimizer.num_moments * master * held.owned
        return {
            "parameters": compute * held.resting,
            "gradients": self._gradient_bytes(moment, held.owned),
            "optimizer": moments + self.optimizer.bytes_per_tensor * held.num_owned,
            "master": master * held.owned if has_master else 0,
            "buffers": sum(self.buffer_bytes(moment, rank).values()),
        }

    def held_elements(self, rank: int) -> HeldElements:
        """Return what `rank` holds of all chunks."""
        if rank not in self._held_by_rank:
            parts = [(self._held_of_chunk(chunk, rank), num) for chunk, num in self._chunks]
            sums = (
                sum(num * part[i] for part, num in parts) for i in range(len(HeldElements._fields))
            )
            self._held_by_rank[rank] = HeldElements(*sums)
        return self._held_by_rank[rank]

    def equivalence_key(self, rank: int) -> Hashable:
        """Return a key that is equal for ranks that hold and send as much."""
        if self.schedule.facts.shares_memory:
            return rank  # what peers read of it differs
        return tuple(
            (_length(chunk.section(rank)), _length(chunk.real_section(rank)), len(spans))
            for chunk, _ in self._chunks
            for spans in (chunk.spans(rank),)
        )

    @cached_property
    def _held_by_rank(self) -> dict[int, HeldElements]:
        return {}

    def _held_of_chunk(self, chunk: Chunk, rank: int) -> HeldElements:
        whole = self.stage.parameters is not Placement.SHARD
        resting = chunk.padded_numel if whole else _length(chunk.section(rank))
        real = chunk.unpadded_numel if whole else _length(chunk.real_section(rank))
        if chunk.kind == FROZEN:
            return HeldElements(resting, resting - real, 0, 0)
        sharded = self.stage.optimizer is Placement.SHARD
        spans = chunk.spans(rank) if sharded else chunk.whole()
        return HeldElements(resting, resting - real, sum(span.numel for span in spans), len(spans))

    @property
    def updates_everywhere(self) -> bool:
        """Whether every rank updates all parameters."""
        return self.stage.optimizer is not Placement.SHARD

    @property
    def parameter_itemsize(self) -> int:
        """Bytes of one element of a parameter at rest."""
        return ITEMSIZE[self.precision.compute]

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of one element of a gradient that autograd leaves: in the wider of the two dtypes it adds them up."""
        return max(ITEMSIZE[self.precision.compute], ITEMSIZE[self.precision.reduce])

    @cached_property
    def num_trainable(self) -> int:
        """Elements of all trainable parameters."""
        return sum(
            num * chunk.unpadded_numel for chunk, num in self._chunks if chunk.kind != FROZEN
        )

    def _gradient_bytes(self, moment: str, owned_numel: int) -> int:
        whole = self.num_trainable
        reduce = ITEMSIZE[self.precision.reduce]
        if moment == "at_rest" or (moment == "after_forward" and self.schedule.accumulation == 1):
            return 0
        if moment == "after_forward" and self.schedule.reduce_each == "step":
            return whole * self.gradient_itemsize  # autograd accumulates them
        if self.stage.gradients is Placement.SHARD:
            return owned_numel * reduce
        return whole * reduce  # the sum of what rests partial lies in it

    def buffer_bytes(self, moment: str, rank: int) -> dict[str, int]:
        """Return what makes up the kind `buffers` at a moment: pools, units kept gathered, memory shared with peers."""
        kept = self.kept_bytes if moment == "after_forward" else 0
        pools, staging = self._pool_bytes(rank), self._staging_bytes(rank)
        return {"pools": pools, "kept units": kept, "shared slots": staging}

    def _pool_bytes(self, rank: int) -> int:
        """Return the bytes of all pools; each pool is as large as its largest unit."""
        if self.stage.gather is not Move.ALL_GATHER:
            return 0
        return sum(
            max((self._pool_bytes_of_unit(i, rank) for i in pool), default=0)
            for pool in self._units_of_pools
        )

    def _pool_bytes_of_unit(self, index: int, rank: int) -> int:
        """Return the bytes a unit takes of its pool. On one host a rank's own section is mapped and takes none."""
        if not self.schedule.facts.shares_memory or self.world_size == 1:
            return self._gathered_bytes[index]
        return mapped_bytes(self.units[index].chunks, rank, ITEMSIZE[self.precision.compute])

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes that stay gathered outside of pools between forward and backward."""
        if self.stage.gather is not Move.ALL_GATHER or self.schedule.keep == "none":
            return 0
        return sum(
            self._gathered_bytes if self.schedule.keep == "all" else self._gathered_bytes[:1]
        )

    @cached_property
    def most_beside_pools(self) -> int:
        """The most bytes of units that lie gathered outside of pools at once.

        They are those that are kept, those inside of which others run, and those that find their pool in use.
        """
        if self.stage.gather is not Move.ALL_GATHER:
            return 0
        return most_beside_pools(
            self._uses, self._units_of_pools, self._gathered_bytes, keep=self.schedule.keep
        )

    def _staging_bytes(self, rank: int) -> int:
        if not self.schedule.facts.shares_memory or self.world_size == 1:
            return 0
        if rank not in self._staging_bytes_by_rank:
            units = [alike.unit.trainable for alike in self.units_by_shape]
            schedule, itemsize = self.schedule, ITEMSIZE[self.precision.reduce]
            slot = slot_bytes(units, self.stage, rank, itemsize, schedule.bucket_bytes)
            self._staging_bytes_by_rank[rank] = num_slots(schedule.transport) * slot
        return self._staging_bytes_by_rank[rank]

    @cached_property
    def _staging_bytes_by_rank(self) -> dict[int, int]:
        return {}

    @cached_property
    def _gathered_bytes(self) -> list[int]:
        """Bytes of each unit while it is gathered."""
        itemsize = ITEMSIZE[self.precision.compute]
        return [sum(aligned(c.padded_numel * itemsize) for c in unit.chunks) for unit in self.units]


def _cut_without_names(chunk: Chunk) -> Cut:
    """Return all of a chunk but its parameters' names."""
    return chunk.kind, chunk.cuts, tuple(member.stop for member in chunk.members)


def _add(traffic: Traffic, kind: str, calls: int, num_bytes: int) -> None:
    """Add `calls` collectives of `num_bytes` each; a kind without collectives gets no entry."""
    if calls:
        sums, counts = traffic.bytes_by_kind, traffic.calls_by_kind
        sums[kind] = sums.get(kind, 0) + calls * num_bytes
        counts[kind] = counts.get(kind, 0) + calls


def _length(section: slice) -> int:
    return section.stop - section.start
