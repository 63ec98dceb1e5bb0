"""Parameters that move together, and the five verbs of their step: gather, free, reduce, hand_over, publish.

What a rank holds of one chunk (N = 4, I am rank 1; '#' real memory, '.' not held):

    parameters rest sharded     full  . . . .  (in a pool only while gathered)    piece  # (my quarter)
    parameters rest replicated  full  # # # #                                     piece  = full[section 1]
    master of another dtype     one flat tensor over the spans the optimizer owns here; else views of piece / full

[Note: freed parameters] While a unit is freed, its parameters have no values and say so on every use (guard.py). What
autograd saved of them is found again in backward (saved.py). Assigning `.data` leaves the version counter alone, and
so does writing into the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from zeroexp.comm.base import GatherPart, Pending
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.stitching import beside_pieces, stitch
from zeroexp.sharding import guard
from zeroexp.sharding.bucket import Bucket, cut_in_buckets
from zeroexp.sharding.gradients import Gradients
from zeroexp.sharding.layout import Chunk, Span, aligned, pages
from zeroexp.sharding.placement import Move, Placement, Stage
from zeroexp.sharding.storage import Private, Store

FROZEN = "frozen"  # the kind of chunks without gradient


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
    pinned: Tensor | None = (
        None  # the same in memory of its own, while somebody reads it (gathered.py)
    )
    in_place: bool = False  # my section of full is the piece itself
    nothing: Tensor = field(init=False)  # what parameters show while they are freed

    def __post_init__(self) -> None:
        self.nothing = self.piece.new_empty(0)

    @property
    def trainable(self) -> bool:
        """When the engine was built; one that is frozen later gets no gradient."""
        return self.chunk.kind != FROZEN


@dataclass(frozen=True)
class HandedOver:
    """What the optimizer is given of one parameter."""

    parameter: nn.Parameter
    master: nn.Parameter  # the elements that this rank updates
    gradient: Tensor  # the sum over ranks, of the master's shape and dtype


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
        self.store: Store | None = (
            None  # the memory of the full parameters, where they rest sharded
        )
        self.chunk_offsets: list[int] = []  # bytes into it at which each chunk's full tensor begins
        self._offer: int | None = None
        self._parts: list[GatherPart] = []
        self.generation = 0  # of the weights: counts the optimizer's steps
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
    def has_separate_masters(self) -> bool:
        """The optimizer updates memory that is not the parameters' own."""
        return any(tensors.master_flat is not None for tensors in self._trainable)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for tensors in self.chunks for parameter in tensors.parameters)

    @property
    def num_trainable(self) -> int:
        return sum(len(tensors.parameters) for tensors in self._trainable)

    def frozen_parameters(self) -> list[nn.Parameter]:
        return [p for t in self.chunks if not t.trainable for p in t.parameters]

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
            whole = tensors.full if self.store is None else None
            kinds["parameters"].append(tensors.piece if whole is None else whole)
            if tensors.master_flat is not None:
                kinds["master"].append(tensors.master_flat)
        kinds["gradients"] = [held for each in self._gradients for held in each.held]
        if isinstance(self.store, Private):
            kinds["buffers"].append(self.store.memory)
        return kinds

    @property
    def has_frozen(self) -> bool:
        return len(self._trainable) < len(self.chunks)

    @property
    def is_pinned(self) -> bool:
        """Its parameters lie whole in memory of their own, see gathered.py."""
        return any(tensors.pinned is not None for tensors in self.chunks)

    @property
    def has_private_store(self) -> bool:
        return isinstance(self.store, Private)

    @property
    def pool_tenant(self) -> object | None:
        return None if self.store is None else self.store.tenant

    # -- parameters: gather, free --------------------------------------------------------------

    @property
    def full_bytes(self) -> int:
        """Bytes of all full chunks, each aligned."""
        return sum(aligned(c.chunk.padded_numel * c.piece.itemsize) for c in self.chunks)

    def reside_in(self, store: Store) -> None:
        """Where the full parameters will lie from now on: views are made once. The unit is freed after it."""
        self.store = store
        start = 0
        memory = store.memory if store.file is None else self._map_beside(store.file)
        for tensors in self.chunks:
            chunk, piece = tensors.chunk, tensors.piece
            num_bytes = chunk.padded_numel * piece.itemsize
            on_pages = chunk.lies_on_pages(self._wire.world.rank, piece.itemsize)
            tensors.in_place = store.file is not None and on_pages
            tensors.full = memory[start : start + num_bytes].view(piece.dtype)
            tensors.views = views_of(chunk, tensors.full, tensors.shapes)
            whole = pages(num_bytes, chunk.page_bytes)
            start += aligned(num_bytes) if store.file is None else whole
        self.chunk_offsets = [
            int(tensors.full.storage_offset()) * tensors.full.itemsize
            for tensors in self.chunks
            if tensors.full is not None
        ]
        self._parts = []
        store.release(forget=True)
        self._vacate()
        if self._offer is None:
            self.offer()
        self.gather_parts()  # now: who counts views of this memory begins to do so with these

    def _map_beside(self, file: int) -> Tensor:
        """The pool's file and, where it lies on pages, what this rank owns."""
        pieces = [(t.chunk, t.piece, self._wire.place_of(t.piece)) for t in self.chunks]
        return stitch(beside_pieces(pieces, self._wire.world.rank, file))

    @property
    def can_gather(self) -> bool:
        """Freed, and the memory to gather into is not in use by another unit."""
        return self.residence is Residence.FREED and self.store is not None and self.store.free

    def gather(self) -> Pending | None:
        """P -> replicate. None if nothing has to move; else call `arrived` after waiting for it."""
        assert self._stage.gather is Move.ALL_GATHER and self.store is not None
        _expect(self, self.residence, Residence.FREED)
        self.store.lease(self)
        if self.store.holds is self or not self.chunks:
            self.arrived()
            return None
        self.store.holds = None
        self.residence = Residence.GATHERING
        return self._wire.all_gather(self.gather_parts(), "gather", self._offer, str(self))

    def arrived(self) -> None:
        """The full parameters are in place: show them to the module."""
        self.residence = Residence.READY
        if self.store is not None:
            self.store.holds = self
            self.show()
            return
        for parameter in self.parameters():
            guard.await_on_use(parameter, None)

    def await_on_use(self, arrive: Callable[[], None]) -> None:
        """Parameters are on their way: whoever uses one before they have arrived calls `arrive` first."""
        for parameter in self.parameters():
            guard.await_on_use(parameter, arrive)

    def free(self, *, forget: bool) -> None:
        """replicate -> P. `forget`: the values are not taken up again even if nobody overwrote them."""
        _expect(self, self.residence, Residence.READY)
        assert self.store is not None
        self.store.release(forget=forget)
        self._vacate()

    def gather_into(self, parts: Sequence[GatherPart]) -> None:
        """The full parameters in other memory, and wait for them; the unit stays as it is."""
        self._wire.all_gather(parts, "gather", self._offer, str(self)).wait()

    def forget(self) -> None:
        """The weights changed: what a pool still holds of this unit is out of date."""
        if self.store is not None and self.store.holds is self:
            self.store.release(forget=True)

    def is_view_of_freed(self, tensor: Tensor) -> bool:
        """Whether `tensor`, which is no parameter, lies in the memory of this unit's freed parameters."""
        if self.store is None or self.residence is not Residence.FREED:
            return False
        if isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()._cdata
        return any(
            tensors.full is not None and tensors.full.untyped_storage()._cdata == storage
            for tensors in self.chunks
        )

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

    def hand_over(self) -> list[HandedOver]:
        """G -> O: each master weight with its gradient, in the master's dtype."""
        replicated = self._stage.gradients is Placement.REPLICATE
        handed: list[HandedOver] = []
        for tensors, gradients in zip(self._trainable, self._gradients, strict=True):
            owned = gradients.owned(replicated=replicated)
            for span, master, gradient in zip(tensors.owned, tensors.masters, owned, strict=True):
                parameter = tensors.parameters[span.member]
                gradient = gradient.to(master.dtype).view_as(master)
                handed.append(HandedOver(parameter, master, gradient))
        return handed

    def has_gradient(self) -> list[bool]:
        """For each trainable parameter, whether this rank's backward has given it a gradient since `zero_grad`."""
        return [
            member in gradients.present
            for tensors, gradients in zip(self._trainable, self._gradients, strict=True)
            for member in range(len(tensors.parameters))
        ]

    def zero_grad(self) -> None:
        for gradients in self._gradients:
            gradients.clear()
        self.take_gradients(taken=False)

    def take_gradients(self, *, taken: bool) -> None:
        """Whether `.grad` of the parameters is the engine's, which raises where somebody else reads it."""
        for tensors in self._trainable:
            for parameter in tensors.parameters:
                guard.take_gradient(parameter, taken=taken)

    # -- parameters again: publish -------------------------------------------------------------

    def publish(self) -> Pending | None:
        """O -> P: masters become parameters everywhere. None if no rank needs another's."""
        self.generation += 1
        for tensors in self._trainable:
            if tensors.master_flat is not None:
                self._cast_masters(tensors)
        if self.is_sharded:
            self.offer()
        if self._stage.publish is not Move.ALL_GATHER or not self._trainable:
            return None
        self.residence = Residence.GATHERING
        return self._wire.all_gather(self.gather_parts(trainable=True), "publish", what=str(self))

    def offer(self) -> None:
        """This rank's pieces may be gathered until the next optimizer step. All ranks do it in one order."""
        self._offer = self._wire.offer(self.gather_parts(), self._offer)

    # -- how --------------------------------------------------------------------------------------

    def gather_parts(self, *, trainable: bool = False) -> list[GatherPart]:
        """All chunks, or the trainable ones, as they lie now; made once for as long as they lie there."""
        if not self._parts:
            self._parts = [
                GatherPart(tensors.chunk, tensors.full, tensors.piece, tensors.in_place)
                for tensors in self.chunks
                if tensors.full is not None
            ]
        pairs = zip(self.chunks, self._parts, strict=True)
        return [part for tensors, part in pairs if tensors.trainable or not trainable]

    def show(self) -> None:
        """Point the parameters at the memory that holds their values, if any does."""
        for tensors in self.chunks:
            if tensors.pinned is not None:
                views = views_of(tensors.chunk, tensors.pinned, tensors.shapes)
            elif self.residence is Residence.READY:
                views = tensors.views
            else:
                for parameter in tensors.parameters:
                    guard.hide(parameter, tensors.nothing)
                continue
            for parameter, view in zip(tensors.parameters, views, strict=True):
                guard.show(parameter, view)

    def _vacate(self) -> None:
        self.residence = Residence.FREED
        self.show()

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
            return self._wire.reduce_scatter(parts, "reduce", str(self))
        sums = [self._gradients[part.index].to_sum(part) for part in bucket.slices]
        summed = self._wire.all_reduce([part for part, _ in sums], "reduce", str(self))

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
