"""A unit is a set of parameters that move together; its five verbs are gather, free, reduce, hand_over, publish.

state.py draws what a rank holds of a unit. stage.py derives from the stage what each verb does.

[Note: freed parameters] While a unit is freed, its parameters have no values and raise on every use (guard.py).
Backward finds again what autograd saved of them (saved.py). Neither assigning `.data` nor writing into the pool
advances a parameter's version counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from zeroexp.comm.base import GatherPart, Pending, Pieces
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.gather_memory import bytes_side_by_side
from zeroexp.cut.bucket import Bucket, cut_in_buckets
from zeroexp.cut.stage import Move, Stage
from zeroexp.measure.verb_seconds import timed_as_verb
from zeroexp.sharding import guard
from zeroexp.sharding.dtypes import Dtypes
from zeroexp.sharding.gradients import Gradients
from zeroexp.sharding.pools import PrivateStore, Store
from zeroexp.sharding.state import MAY_BECOME, ChunkTensors, Residence


@dataclass(frozen=True)
class MasterGradient:
    """The optimizer is given one of these for each span that this rank updates."""

    parameter: nn.Parameter
    master: nn.Parameter  # the elements that this rank updates
    gradient: Tensor  # the sum over ranks, of the master's shape, dtype and device


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
        self.store: Store | None = None  # memory of the full parameters, where they rest sharded
        self.generation = 0  # number of optimizer steps that the weights have taken
        self.trainable = [tensors for tensors in chunks if tensors.is_trainable]
        self._stage = stage
        self._wire = wire
        self._offer: int | None = None
        self._parts = [GatherPart(t.chunk, t.full, t.piece) for t in chunks if t.full is not None]
        self._gradients = [Gradients(t, stage, dtypes, wire.world) for t in self.trainable]
        self.buckets = cut_in_buckets(
            [tensors.chunk for tensors in self.trainable], dtypes.reduce.itemsize, bucket_bytes
        )

    def __repr__(self) -> str:
        return f"unit {self.name or '(root)'}"

    # -- gather: P -> replicate, before forward and before backward ------------------------------

    def gather(self) -> Pending | None:
        """Start P -> replicate. Wait for what it returns, then call `show_gathered`; None: nothing moves."""
        assert self._stage.gather is Move.ALL_GATHER and self.store is not None
        self.store.lease(self)
        if self.store.valid_for is self or not self.chunks:
            self.show_gathered()
            return None
        self.store.valid_for = None
        self._become(Residence.GATHERING)
        return self._wire.all_gather(self.gather_parts(), "gather", self._offer, str(self))

    def show_gathered(self) -> None:
        """Show the full parameters to the module, now that they are in place."""
        self._become(Residence.READY)
        if self.store is not None:
            self.store.valid_for = self
            self.show()

    # -- free: replicate -> P, after forward and after backward ----------------------------------

    def free(self, *, forget: bool) -> None:
        """Carry out replicate -> P. With `forget` the next gather moves the values even if they still lie there."""
        assert self.store is not None
        self._become(Residence.FREED)
        self.store.release(forget=forget)
        self.show()

    def free_until_used(self, gather_again: Callable[[], None]) -> None:
        """Give the memory back before the last gradients come; whoever uses a parameter gathers the unit again.

        The parameters keep their shapes, with which autograd compares those of gradients. `show` ends this.
        """
        assert isinstance(self.store, PrivateStore)
        self._become(Residence.FREED)
        self.store.release(forget=True)
        self.await_on_use(gather_again)

    def forget(self) -> None:
        """Drop what a pool still holds of this unit, which is out of date because the weights changed."""
        if self.store is not None and self.store.valid_for is self:
            self.store.release(forget=True)

    # -- reduce: partial -> G, when gradients are ready ------------------------------------------

    def reduce(self, bucket: Bucket) -> Pending | None:
        """Start partial -> G for the gradients that autograd left in the parameters; missing ones count as zeros."""
        return self._reduce(self._stage.reduce, bucket)

    # -- hand_over: G -> O, before the optimizer's step ------------------------------------------

    @timed_as_verb("hand_over")
    def reduce_to_owner(self, bucket: Bucket) -> Pending | None:
        """Start the part of `hand_over` that communicates: partial -> O, in place in the owner's span."""
        return self._reduce(self._stage.hand_over, bucket)

    @timed_as_verb("hand_over")
    def hand_over(self) -> list[MasterGradient]:
        """Carry out G -> O: return each master weight with its gradient, which has the master's dtype and device."""
        handed: list[MasterGradient] = []
        for tensors, gradients in zip(self.trainable, self._gradients, strict=True):
            owned = zip(tensors.owned, tensors.masters, gradients.owned(), strict=True)
            for span, master, gradient in owned:
                gradient = gradient.to(master.dtype).view(master.shape)
                handed.append(MasterGradient(tensors.parameters[span.member], master, gradient))
        return handed

    # -- publish: O -> P, after the optimizer's step ---------------------------------------------

    @timed_as_verb("publish")
    def publish(self) -> Pending | None:
        """Start O -> P: masters become parameters everywhere. Returns None if no rank needs another rank's masters."""
        self.generation += 1
        for tensors in self.trainable:
            tensors.cast_masters()
        if self.is_sharded:
            self.offer()
        if self._stage.publish is not Move.ALL_GATHER or not self.trainable:
            return None
        self._become(Residence.GATHERING)
        return self._wire.all_gather(self.gather_parts(trainable=True), "publish", what=str(self))

    def zero_grad(self) -> None:
        for gradients in self._gradients:
            gradients.clear()
        self.mark_gradients_taken(taken=False)

    # -- what it is ------------------------------------------------------------------------------

    @property
    def is_root(self) -> bool:
        return not self.name

    @property
    def is_sharded(self) -> bool:
        return self._stage.gather is Move.ALL_GATHER

    @property
    def reduces_at_hand_over(self) -> bool:
        """Whether gradients rest partial and are summed on the way to the optimizer."""
        return self._stage.hand_over is Move.REDUCE_SCATTER

    @property
    def can_gather(self) -> bool:
        """Whether the unit is freed and no other unit uses the memory it gathers into."""
        return self.residence is Residence.FREED and self.store is not None and self.store.is_free

    @property
    def is_pinned(self) -> bool:
        """Whether the parameters lie whole in memory of their own, see gathered.py."""
        return any(tensors.pinned is not None for tensors in self.chunks)

    @property
    def has_private_store(self) -> bool:
        return isinstance(self.store, PrivateStore)

    @property
    def has_frozen(self) -> bool:
        return len(self.trainable) < len(self.chunks)

    @property
    def full_bytes(self) -> int:
        """Bytes of all full chunks side by side, each aligned."""
        return bytes_side_by_side(self.pieces())

    def pieces(self) -> Pieces:
        return [(tensors.chunk, tensors.piece) for tensors in self.chunks]

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for tensors in self.chunks for parameter in tensors.parameters)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for tensors in self.trainable for parameter in tensors.parameters]

    def parameters_with_masters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return each parameter with the master weights that this rank updates of it."""
        return [
            (tensors.parameters[span.member], master)
            for tensors in self.trainable
            for span, master in zip(tensors.owned, tensors.masters, strict=True)
        ]

    @property
    def has_separate_masters(self) -> bool:
        """Whether the optimizer updates memory that is not the parameters' own."""
        return any(tensors.master_flat is not None for tensors in self.trainable)

    def parameters_in(self, bucket: Bucket) -> set[nn.Parameter]:
        """Return the parameters of which the bucket holds elements."""
        return {
            self.trainable[part.index].parameters[each.member]
            for part in bucket.slices
            for each in part.ranges
        }

    def gradient_presence(self) -> list[bool]:
        """Tell for each trainable parameter whether this rank's backward gave it a gradient since `zero_grad`."""
        return [present for gradients in self._gradients for present in gradients.present]

    def states(self) -> dict[str, list[Tensor]]:
        """Return the tensors that exist now, by kind of memory."""
        at_rest = [
            t.piece if t.full is None or self.store is not None else t.full for t in self.chunks
        ]
        return {
            "parameters": at_rest,
            "gradients": [held for each in self._gradients for held in each.held],
            "master": [t.master_flat for t in self.chunks if t.master_flat is not None],
            "buffers": [self.store.memory] if isinstance(self.store, PrivateStore) else [],
        }

    # -- where it lies ---------------------------------------------------------------------------

    def use_store(self, store: Store) -> None:
        """Let the full parameters lie in `store` from now on, and free the unit."""
        self.store = store
        self._parts = store.lay(self.pieces())
        for tensors, part in zip(self.chunks, self._parts, strict=True):
            tensors.place_in(part.full)
        store.release(forget=True)
        self.residence = Residence.FREED
        self.show()
        if self._offer is None:
            self.offer()

    def offer(self) -> None:
        """Allow peers to gather this rank's pieces until the next optimizer step. All ranks call it in one order."""
        self._offer = self._wire.offer(self.gather_parts(), self._offer)

    def gather_parts(self, *, trainable: bool = False) -> list[GatherPart]:
        """Return parts for all chunks, or for the trainable ones."""
        pairs = zip(self.chunks, self._parts, strict=True)
        return [part for tensors, part in pairs if tensors.is_trainable or not trainable]

    def gather_into(self, parts: Sequence[GatherPart]) -> None:
        """Gather the full parameters into other memory and wait for them; the unit stays as it is."""
        self._wire.all_gather(parts, "gather", self._offer, str(self)).wait()

    # -- what its parameters show ----------------------------------------------------------------

    def show(self) -> None:
        """Point the parameters at the memory that holds their values, or at no memory where none does."""
        for tensors in self.chunks:
            tensors.show(there=self.residence is Residence.READY)

    def shown_otherwise(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of a freed unit that somebody has given other memory."""
        for tensors in self.chunks:
            for parameter, nothing in zip(tensors.parameters, tensors.nothing, strict=True):
                if parameter.untyped_storage()._cdata != nothing.untyped_storage()._cdata:
                    yield parameter

    def await_on_use(self, arrive: Callable[[], None] | None) -> None:
        """Let any use of a parameter call `arrive` first, which gathers it again; None: the values are there."""
        for parameter in self.parameters():
            guard.await_on_use(parameter, arrive)

    def mark_gradients_taken(self, *, taken: bool) -> None:
        """Mark `.grad` of the parameters as taken by the engine or not; reading a taken one raises."""
        for parameter in self.trainable_parameters():
            guard.mark_gradient_taken(parameter, taken=taken)

    # -- how --------------------------------------------------------------------------------------

    def _become(self, residence: Residence) -> None:
        if residence not in MAY_BECOME[self.residence]:
            raise RuntimeError(
                f"{self} is {self.residence.value} and can not become {residence.value}"
            )
        self.residence = residence

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
