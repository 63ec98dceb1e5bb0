"""A unit is a set of parameters that move together; its five verbs are gather, free, reduce, hand_over, publish.

Rank 1 of 4 holds this of one chunk ('#' real memory, '.' not held):

    parameters rest sharded     full  . . . .  (in a pool only while gathered)    piece  # (its quarter)
    parameters rest replicated  full  # # # #                                     piece  = full[section 1]
    master of another dtype     one flat tensor over the spans the optimizer owns here
    master of the same dtype    views of piece / full

[Note: freed parameters] While a unit is freed, its parameters have no values and raise on every use (guard.py).
Backward finds again what autograd saved of them (saved.py). Neither assigning `.data` nor writing into the pool
advances a parameter's version counter.
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
from zeroexp.measure.verbs import named
from zeroexp.sharding import guard
from zeroexp.sharding.bucket import Bucket, cut_in_buckets
from zeroexp.sharding.gradients import Gradients
from zeroexp.sharding.layout import Chunk, Span, aligned, pages
from zeroexp.sharding.placement import Move, Placement, Stage
from zeroexp.sharding.pools import Private, Store

FROZEN = "frozen"  # the kind of chunks that get no gradient


class Residence(Enum):
    """The residence says what memory the parameters of a unit occupy."""

    FREED = "freed"  # only this rank's piece exists
    GATHERING = "gathering"  # a collective is writing the full parameters
    READY = "ready"  # the full parameters can be used


@dataclass(frozen=True)
class Dtypes:
    """The strategy's table names these three dtypes."""

    compute: torch.dtype  # dtype of parameters and of the gradients autograd makes
    reduce: torch.dtype  # dtype of gradients on the wire and of what reduction leaves
    master: torch.dtype  # dtype of the weights the optimizer updates


@dataclass
class ChunkTensors:
    """This rank holds these tensors of one chunk."""

    chunk: Chunk
    parameters: list[nn.Parameter]  # the members, in order
    shapes: list[torch.Size]
    piece: Tensor  # this rank's section, flat, compute dtype
    owned: tuple[Span, ...]  # the elements that the optimizer updates on this rank
    masters: list[nn.Parameter] = field(default_factory=list)  # one for each owned span
    master_flat: Tensor | None = None  # the masters' memory, where it is not the parameters' own
    full: Tensor | None = None  # flat and padded; None until the unit has a store
    views: list[Tensor] = field(default_factory=list)  # views of full, one for each parameter
    # A copy of full in memory of its own, while `gathered` shows it (gathered.py).
    pinned: Tensor | None = None
    in_place: bool = False  # whether this rank's section of full is the piece itself
    nothing: Tensor = field(init=False)  # the empty tensor that freed parameters show

    def __post_init__(self) -> None:
        self.nothing = self.piece.new_empty(0)

    @property
    def trainable(self) -> bool:
        """Whether the chunk was trainable when the engine was built; a parameter frozen later gets no gradient."""
        return self.chunk.kind != FROZEN


@dataclass(frozen=True)
class HandedOver:
    """The optimizer is given one of these for each span that this rank updates."""

    parameter: nn.Parameter
    master: nn.Parameter  # the elements that this rank updates
    gradient: Tensor  # the sum over ranks, of the master's shape and dtype


class Unit:
    """A unit is one set of parameters under one stage. Its verbs are listed in the order of the step."""

    def __init__(
        self,
        name: str,
        chunks: list[ChunkTensors],
        stage: Stage,
        dtypes: Dtypes,
        wire: Collectives,
        bucket_bytes: int | None = None,
    ):
        """One reduction takes at most `bucket_bytes`, or the whole unit where that is None."""
        self.name = name
        self.chunks = chunks
        self.residence = Residence.READY
        self._trainable = [tensors for tensors in chunks if tensors.trainable]
        self._stage = stage
        self._wire = wire
        # The memory of the full parameters, where they rest sharded.
        self.store: Store | None = None
        # Bytes into the store at which each chunk's full tensor begins.
        self.chunk_offsets: list[int] = []
        self._offer: int | None = None
        self._parts: list[GatherPart] = []
        self.generation = 0  # number of optimizer steps that the weights have taken
        self._gradients = [self._gradients_of(tensors, dtypes) for tensors in self._trainable]
        trainable = [tensors.chunk for tensors in self._trainable]
        self.buckets = cut_in_buckets(trainable, dtypes.reduce.itemsize, bucket_bytes)

    def __repr__(self) -> str:
        return f"unit {self.name or '(root)'}"

    @property
    def is_root(self) -> bool:
        return not self.name

    # -- what it is made of ------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        return self._stage.gather is Move.ALL_GATHER

    @property
    def reduces_at_hand_over(self) -> bool:
        """Whether gradients rest partial and are summed on the way to the optimizer."""
        return self._stage.hand_over is Move.REDUCE_SCATTER

    @property
    def has_separate_masters(self) -> bool:
        """Whether the optimizer updates memory that is not the parameters' own."""
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
        """Return each parameter with the master weights that this rank updates of it."""
        return [
            (tensors.parameters[span.member], master)
            for tensors in self._trainable
            for span, master in zip(tensors.owned, tensors.masters, strict=True)
        ]

    def states(self) -> dict[str, list[Tensor]]:
        """Return the tensors that exist now, by kind of memory."""
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
        """Whether the parameters lie whole in memory of their own, see gathered.py."""
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
        """Make views of the full parameters in `store`, where they lie from now on, and free the unit."""
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
        self.vacate()
        if self._offer is None:
            self.offer()
        self.gather_parts()  # their views must exist when views.py begins to count views of this memory

    def _map_beside(self, file: int) -> Tensor:
        """Map the pool's file, with the sections that this rank owns in their place where those lie on pages."""
        pieces = [(t.chunk, t.piece, self._wire.place_of(t.piece)) for t in self.chunks]
        return stitch(beside_pieces(pieces, self._wire.world.rank, file))

    @property
    def can_gather(self) -> bool:
        """Whether the unit is freed and no other unit uses the memory it gathers into."""
        return self.residence is Residence.FREED and self.store is not None and self.store.free

    def gather(self) -> Pending | None:
        """Start P -> replicate. Returns None if nothing has to move; else wait for the result and call `arrived`."""
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
        """Show the full parameters to the module, now that they are in place."""
        self.residence = Residence.READY
        if self.store is not None:
            self.store.holds = self
            self.show()
            return
        for parameter in self.parameters():
            guard.await_on_use(parameter, None)

    def await_on_use(self, arrive: Callable[[], None]) -> None:
        """Let any use of a parameter in flight call `arrive` first, which waits for the values."""
        for parameter in self.parameters():
            guard.await_on_use(parameter, arrive)

    def free(self, *, forget: bool) -> None:
        """Carry out replicate -> P. With `forget` the next gather moves the values even if they still lie there."""
        _expect(self, self.residence, Residence.READY)
        assert self.store is not None
        self.store.release(forget=forget)
        self.vacate()

    def let_go(self, gather_again: Callable[[], None]) -> None:
        """Give the memory back before the last gradients come; whoever uses a parameter gathers the unit again.

        The parameters keep their shapes, with which autograd compares those of gradients. `vacate` ends this.
        """
        _expect(self, self.residence, Residence.READY)
        assert isinstance(self.store, Private)
        self.store.release(forget=True)
        self.residence = Residence.FREED
        self.await_on_use(gather_again)

    def gather_into(self, parts: Sequence[GatherPart]) -> None:
        """Gather the full parameters into other memory and wait for them; the unit stays as it is."""
        self._wire.all_gather(parts, "gather", self._offer, str(self)).wait()

    def forget(self) -> None:
        """Drop what a pool still holds of this unit, which is out of date because the weights changed."""
        if self.store is not None and self.store.holds is self:
            self.store.release(forget=True)

    def is_view_of_freed(self, tensor: Tensor) -> bool:
        """Tell whether `tensor` is no parameter and lies in the memory of this unit's freed parameters."""
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
        """Return the parameters of which the bucket holds elements."""
        return {
            self._trainable[part.index].parameters[each.member]
            for part in bucket.slices
            for each in part.ranges
        }

    def reduce(self, bucket: Bucket) -> Pending | None:
        """Start partial -> G for the gradients that autograd left in the parameters; missing ones count as zeros."""
        return self._reduce(self._stage.reduce, bucket)

    @named("hand_over")
    def reduce_to_owner(self, bucket: Bucket) -> Pending | None:
        """Start the part of `hand_over` that communicates: partial -> O, in place in the owner's span."""
        return self._reduce(self._stage.hand_over, bucket)

    @named("hand_over")
    def hand_over(self) -> list[HandedOver]:
        """Carry out G -> O: return each master weight with its gradient, in the master's dtype."""
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
        """Tell for each trainable parameter whether this rank's backward gave it a gradient since `zero_grad`."""
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
        """Mark `.grad` of the parameters as taken by the engine or not; reading a taken one raises."""
        for tensors in self._trainable:
            for parameter in tensors.parameters:
                guard.take_gradient(parameter, taken=taken)

    # -- parameters again: publish -------------------------------------------------------------

    @named("publish")
    def publish(self) -> Pending | None:
        """Start O -> P: masters become parameters everywhere. Returns None if no rank needs another rank's masters."""
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
        """Allow peers to gather this rank's pieces until the next optimizer step. All ranks call it in one order."""
        self._offer = self._wire.offer(self.gather_parts(), self._offer)

    # -- how --------------------------------------------------------------------------------------

    def gather_parts(self, *, trainable: bool = False) -> list[GatherPart]:
        """Return parts for all chunks, or for the trainable ones; they are made once per memory the unit lies in."""
        if not self._parts:
            self._parts = [
                GatherPart(tensors.chunk, tensors.full, tensors.piece, tensors.in_place)
                for tensors in self.chunks
                if tensors.full is not None
            ]
        pairs = zip(self.chunks, self._parts, strict=True)
        return [part for tensors, part in pairs if tensors.trainable or not trainable]

    def show(self) -> None:
        """Point the parameters at the memory that holds their values, or at no memory where none does."""
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

    def vacate(self) -> None:
        """Let the parameters show no memory, and raise where one is used."""
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
        """Copy masters of another dtype into the parameters they stand for."""
        for master, span in zip(tensors.masters, tensors.owned, strict=True):
            if self._stage.optimizer is Placement.SHARD:
                target = tensors.piece[span.offset : span.offset + span.numel]
            else:
                assert tensors.full is not None
                target = tensors.full[span.offset : span.offset + span.numel]
            target.copy_(master.detach().reshape(-1))


def views_of(chunk: Chunk, full: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return a view of each member of a flat chunk, in the member's shape."""
    return [
        full[member.start : member.stop].view(shape)
        for member, shape in zip(chunk.members, shapes, strict=True)
    ]


def _expect(unit: Unit, now: Residence, needed: Residence) -> None:
    if now is not needed:
        raise RuntimeError(f"{unit} is {now.value}, must be {needed.value} here")
