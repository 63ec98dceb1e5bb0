"""Parameters that move together, and the five verbs of their step: gather, free, reduce, hand_over, publish.

What a rank holds of one chunk (N = 4, I am rank 1; '#' real memory, '.' not held):

    parameters rest sharded     full  . . . .  (in a pool only while gathered)    piece  # (my quarter)
    parameters rest replicated  full  # # # #                                     piece  = full[section 1]
    master of another dtype     one flat tensor over the spans the optimizer owns here; else views of piece / full

[Note: freed parameters] While a unit is freed, the data of its parameters is an empty tensor: an operation on it
raises a shape error instead of reading another unit's values out of the pool. Assigning `.data` leaves the
version counter alone, and so does writing into the pool, so autograd's saved parameters stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from zeroexp.sharding.bucket import Bucket, cut_in_buckets
from zeroexp.sharding.collectives import Collectives
from zeroexp.sharding.form import mapped_bytes
from zeroexp.sharding.gradients import Gradients
from zeroexp.sharding.layout import Chunk, Span, aligned, pages
from zeroexp.sharding.moves import GatherPart, Pending
from zeroexp.sharding.placement import Move, Placement, Stage
from zeroexp.sharding.stitching import Stretch, stitch
from zeroexp.sharding.storage import Private, Store


class Residence(Enum):
    """What memory the parameters of a unit occupy."""

    FREED = "freed"  # this rank's piece only
    GATHERING = "gathering"  # a collective is writing the full parameters
    READY = "ready"  # full parameters, usable


@dataclass(frozen=True)
class Dtypes:
    """The dtype column of the strategy's table."""

    compute: torch.dtype  # of parameters and of the gradients autograd makes
    reduce: torch.dtype  # of gradients on the wire and of what reduction leaves
    master: torch.dtype  # of the weights the optimizer updates


@dataclass
class ChunkTensors:
    """What this rank holds of one chunk."""

    chunk: Chunk
    parameters: list[nn.Parameter]  # the members, in order
    shapes: list[torch.Size]
    piece: Tensor  # my section, flat, compute dtype
    owned: tuple[Span, ...]  # what the optimizer updates here
    masters: list[nn.Parameter] = field(default_factory=list)  # one for each owned span
    master_flat: Tensor | None = None  # their storage, where it is not the parameters' own
    full: Tensor | None = None  # flat and padded; None until the unit has a store
    views: list[Tensor] = field(default_factory=list)  # of full, one for each parameter
    in_place: bool = False  # my section of full is the piece itself

    @property
    def trainable(self) -> bool:
        return self.parameters[0].requires_grad


class Unit:
    """One set of parameters under one stage. The verbs are listed in the order of the step."""

    def __init__(
        self,
        name: str,
        chunks: list[ChunkTensors],
        stage: Stage,
        dtypes: Dtypes,
        wire: Collectives,
        bucket_bytes: int | None = None,
    ):
        """`bucket_bytes`: the most that one reduction takes; None: the whole unit."""
        self.name = name
        self.chunks = chunks
        self.residence = Residence.READY
        self._trainable = [tensors for tensors in chunks if tensors.trainable]
        self._stage = stage
        self._wire = wire
        self._store: Store | None = None
        self._offer: int | None = None
        self._gradients = [self._gradients_of(tensors, dtypes) for tensors in self._trainable]
        trainable = [tensors.chunk for tensors in self._trainable]
        self.buckets = cut_in_buckets(trainable, dtypes.reduce.itemsize, bucket_bytes)

    def __repr__(self) -> str:
        return f"unit {self.name or '(root)'}"

    # -- what it is made of ------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        return self._stage.gather is Move.ALL_GATHER

    @property
    def reduces_at_hand_over(self) -> bool:
        """Gradients rest partial: they are summed on the way to the optimizer."""
        return self._stage.hand_over is Move.REDUCE_SCATTER

    @property
    def num_trainable(self) -> int:
        return sum(len(tensors.parameters) for tensors in self._trainable)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for tensors in self._trainable for parameter in tensors.parameters]

    def masters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter with the master weights this rank updates of it."""
        return [
            (tensors.parameters[span.member], master)
            for tensors in self._trainable
            for span, master in zip(tensors.owned, tensors.masters, strict=True)
        ]

    def states(self) -> dict[str, list[Tensor]]:
        """The tensors held now, by kind of memory."""
        kinds: dict[str, list[Tensor]] = {
            "parameters": [],
            "gradients": [],
            "master": [],
            "buffers": [],
        }
        for tensors in self.chunks:
            whole = tensors.full if self._store is None else None
            kinds["parameters"].append(tensors.piece if whole is None else whole)
            if tensors.master_flat is not None:
                kinds["master"].append(tensors.master_flat)
        kinds["gradients"] = [held for each in self._gradients for held in each.held]
        if isinstance(self._store, Private):
            kinds["buffers"].append(self._store.memory)
        return kinds

    @property
    def has_frozen(self) -> bool:
        return len(self._trainable) < len(self.chunks)

    @property
    def has_private_store(self) -> bool:
        return isinstance(self._store, Private)

    @property
    def pool_tenant(self) -> object | None:
        return None if self._store is None else self._store.tenant

    # -- parameters: gather, free --------------------------------------------------------------

    @property
    def full_bytes(self) -> int:
        """Bytes of all full chunks, each aligned."""
        return sum(aligned(c.chunk.padded_numel * c.piece.itemsize) for c in self.chunks)

    @property
    def mapped_bytes(self) -> int:
        """Bytes it takes of a pool whose memory it maps beside its own pieces."""
        chunks = [tensors.chunk for tensors in self.chunks]
        itemsize = self.chunks[0].piece.itemsize if self.chunks else 0
        return mapped_bytes(chunks, self._wire.world.rank, itemsize)

    def reside_in(self, store: Store) -> None:
        """Where the full parameters will lie from now on: views are made once. The unit is freed after it."""
        self._store = store
        mapped = store.file is not None
        memory = store.memory if store.file is None else stitch(self._stretches(store.file))
        start = 0
        for tensors in self.chunks:
            tensors.in_place = mapped and self._is_on_pages(tensors)
            num_bytes = tensors.chunk.padded_numel * tensors.piece.itemsize
            tensors.full = memory[start : start + num_bytes].view(tensors.piece.dtype)
            tensors.views = views_of(tensors.chunk, tensors.full, tensors.shapes)
            start += pages(num_bytes) if mapped else aligned(num_bytes)
        store.release(forget=True)
        self._vacate()

    @property
    def can_gather(self) -> bool:
        """Freed, and the memory to gather into is not in use by another unit."""
        return self.residence is Residence.FREED and self._store is not None and self._store.free

    def gather(self) -> Pending | None:
        """P -> replicate. None if nothing has to move; else call `arrived` after waiting for it."""
        assert self._stage.gather is Move.ALL_GATHER and self._store is not None
        _expect(self, self.residence, Residence.FREED)
        self._store.lease(self)
        if self._store.holds is self or not self.chunks:
            self.arrived()
            return None
        self._store.holds = None
        self.residence = Residence.GATHERING
        return self._wire.all_gather(self._gather_parts(), "gather", self._offer)

    def arrived(self) -> None:
        """The full parameters are in place: show them to the module."""
        if self._store is not None:
            self._store.holds = self
            for tensors in self.chunks:
                for parameter, view in zip(tensors.parameters, tensors.views, strict=True):
                    parameter.data = view
        self.residence = Residence.READY

    def free(self, *, forget: bool) -> None:
        """replicate -> P. `forget`: the values are not taken up again even if nobody overwrote them."""
        _expect(self, self.residence, Residence.READY)
        assert self._store is not None
        self._store.release(forget=forget)
        self._vacate()

    def forget(self) -> None:
        """The weights changed: what a pool still holds of this unit is out of date."""
        if self._store is not None and self._store.holds is self:
            self._store.release(forget=True)

    # -- gradients: reduce, hand_over ----------------------------------------------------------

    def parameters_in(self, bucket: Bucket) -> set[nn.Parameter]:
        """Those of which the bucket holds elements."""
        return {
            self._trainable[part.index].parameters[each.member]
            for part in bucket.slices
            for each in part.ranges
        }

    def reduce(self, bucket: Bucket) -> Pending | None:
        """partial -> G, of the gradients autograd has left in the parameters; missing ones count as zeros."""
        return self._reduce(self._stage.reduce, bucket)

    def reduce_to_owner(self, bucket: Bucket) -> Pending | None:
        """The part of `hand_over` that communicates: partial -> O, in place in the owner's span."""
        return self._reduce(self._stage.hand_over, bucket)

    def hand_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        """G -> O: each master weight with its gradient, in the master's dtype."""
        replicated = self._stage.gradients is Placement.REPLICATE
        pairs: list[tuple[nn.Parameter, Tensor]] = []
        for tensors, gradients in zip(self._trainable, self._gradients, strict=True):
            owned = gradients.owned(replicated=replicated)
            for master, gradient in zip(tensors.masters, owned, strict=True):
                pairs.append((master, gradient.to(master.dtype).view_as(master)))
        return pairs

    def zero_grad(self) -> None:
        for gradients in self._gradients:
            gradients.clear()

    # -- parameters again: publish -------------------------------------------------------------

    def publish(self) -> Pending | None:
        """O -> P: masters become parameters everywhere. None if no rank needs another's."""
        for tensors in self._trainable:
            if tensors.master_flat is not None:
                self._cast_masters(tensors)
        if self.is_sharded:
            self.offer()
        if self._stage.publish is not Move.ALL_GATHER or not self._trainable:
            return None
        self.residence = Residence.GATHERING
        return self._wire.all_gather(self._gather_parts(self._trainable), "publish")

    def offer(self) -> None:
        """This rank's pieces may be gathered until the next optimizer step."""
        self._offer = self._wire.offer(self._gather_parts())

    # -- how --------------------------------------------------------------------------------------

    def _gather_parts(self, chunks: Sequence[ChunkTensors] | None = None) -> list[GatherPart]:
        parts: list[GatherPart] = []
        for tensors in self.chunks if chunks is None else chunks:
            assert tensors.full is not None
            parts.append(GatherPart(tensors.chunk, tensors.full, tensors.piece, tensors.in_place))
        return parts

    def _stretches(self, pool: int) -> list[Stretch]:
        """Chunk by chunk, each on pages of its own: others' sections in the pool's file, mine where it rests."""
        stretches: list[Stretch] = []
        taken = 0
        for tensors in self.chunks:
            num_bytes = pages(tensors.chunk.padded_numel * tensors.piece.itemsize)
            place = self._wire.place_of(tensors.piece)
            if place is not None and self._is_on_pages(tensors):
                before = tensors.chunk.cuts[self._wire.world.rank] * tensors.piece.itemsize
                stretches.append(Stretch(pool, taken, before))
                stretches.append(Stretch(*place, tensors.piece.nbytes))
                taken += before
                num_bytes -= before + tensors.piece.nbytes
            stretches.append(Stretch(pool, taken, num_bytes))
            taken += num_bytes
        return [stretch for stretch in stretches if stretch.num_bytes]

    def _is_on_pages(self, tensors: ChunkTensors) -> bool:
        return tensors.chunk.lies_on_pages(self._wire.world.rank, tensors.piece.itemsize)

    def _vacate(self) -> None:
        for tensors in self.chunks:
            for parameter in tensors.parameters:
                parameter.data = tensors.piece.new_empty(0)
        self.residence = Residence.FREED

    def _gradients_of(self, tensors: ChunkTensors, dtypes: Dtypes) -> Gradients:
        world = self._wire.world
        stays = self._stage.gradients is Placement.PARTIAL or world.size == 1
        return Gradients(
            tensors.chunk,
            tensors.parameters,
            tensors.owned,
            rank=world.rank,
            stage=self._stage,
            dtype=dtypes.reduce,
            in_place=stays and dtypes.reduce is dtypes.compute,
        )

    def _reduce(self, move: Move, bucket: Bucket) -> Pending | None:
        if move in (Move.NOTHING, Move.SLICE):
            return None
        if move is Move.REDUCE_SCATTER:
            parts = [self._gradients[part.index].to_scatter(part) for part in bucket.slices]
            return self._wire.reduce_scatter(parts, "reduce")
        sums = [self._gradients[part.index].to_sum(part) for part in bucket.slices]
        summed = self._wire.all_reduce([part for part, _ in sums], "reduce")

        def keep() -> None:
            for _, keep_one in sums:
                keep_one()

        return Pending([summed], keep)

    def _cast_masters(self, tensors: ChunkTensors) -> None:
        """Masters of another dtype, copied into the parameters they stand for."""
        for master, span in zip(tensors.masters, tensors.owned, strict=True):
            if self._stage.optimizer is Placement.SHARD:
                target = tensors.piece[span.offset : span.offset + span.numel]
            else:
                assert tensors.full is not None
                target = tensors.full[span.offset : span.offset + span.numel]
            target.copy_(master.detach().reshape(-1))


def views_of(chunk: Chunk, full: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The members of a flat chunk, each in its shape."""
    return [
        full[member.start : member.stop].view(shape)
        for member, shape in zip(chunk.members, shapes, strict=True)
    ]


def _expect(unit: Unit, now: Residence, needed: Residence) -> None:
    if now is not needed:
        raise RuntimeError(f"{unit} is {now.value}, must be {needed.value} here")
