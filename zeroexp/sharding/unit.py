"""A unit is a set of parameters that move together; its five verbs are gather, free, reduce, hand_over, publish.

state.py draws what a rank holds of a unit. stage.py derives from the stage what each verb does.

[Note: one storage] The full parameters of a unit that rests sharded lie in one storage, from the first day to the
last. It is resized to nothing while the unit is freed, and back; it is never replaced. So a view of it, such as
backward makes of what autograd saved (saved.py), is right again once the unit is gathered again. Meanwhile the
parameters have no values and raise on every use (guard.py). Where somebody else holds a view, the bytes stay until that
view is gone: reading it ends in no crash, and refusals/kept_views.py refuses it. Neither assigning `.data` nor writing
into the storage advances a parameter's version counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroexp.comm.base import GatherPart, Pending
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.sizes import aligned
from zeroexp.cut.bucket import Bucket, cut_in_buckets
from zeroexp.cut.chunk import FROZEN
from zeroexp.cut.stage import Move, Stage
from zeroexp.measure.verb_seconds import timed_as_verb
from zeroexp.sharding import guard
from zeroexp.sharding.dtypes import Dtypes
from zeroexp.sharding.gradients import Gradients
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
        self.memory: Tensor | None = (
            None  # flat, uint8: the full parameters, where they rest sharded
        )
        self.generation = 0  # number of optimizer steps that the weights have taken
        self.trainable = [tensors for tensors in chunks if tensors.is_trainable]
        self._stage = stage
        self._wire = wire
        self._offer: int | None = None
        self._arriving: Pending | None = None
        self._parts = [GatherPart(t.chunk, t.full, t.piece) for t in chunks if t.full is not None]
        self._parts_published = [part for part in self._parts if part.chunk.kind != FROZEN]
        self._gradients = [Gradients(t, stage, dtypes, wire.group) for t in self.trainable]
        self.buckets = cut_in_buckets(
            [tensors.chunk for tensors in self.trainable], dtypes.reduce.itemsize, bucket_bytes
        )

    def __repr__(self) -> str:
        return f"unit {self.name or '(root)'}"

    # -- gather: P -> replicate, before forward and before backward ------------------------------

    @timed_as_verb("gather")
    def gather(self) -> None:
        """Start P -> replicate; `arrive` ends it."""
        assert self.memory is not None
        self._become(Residence.GATHERING)
        self.memory.untyped_storage().resize_(self._num_bytes)
        self._arriving = self._wire.all_gather(self._parts, "gather", self._offer, str(self))

    def arrive(self) -> None:
        """Return when nothing is in flight, and show the full parameters to the module."""
        if self._arriving is not None:
            self.wait()
            self._arriving = None
            self._become(Residence.READY)
            if self.is_sharded:
                self.show()

    def wait(self) -> None:
        """Return when nothing is in flight; what has arrived is not shown yet."""
        if self._arriving is not None:
            self._arriving.wait()

    # -- free: replicate -> P, after forward and after backward ----------------------------------

    def free(self) -> None:
        """Carry out replicate -> P; a freed unit shows no values from here on, see `free_until_used`."""
        self.arrive()
        if self.residence is Residence.READY:
            self._become(Residence.FREED)
        self.show()
        self.drop_bytes()

    def free_until_used(self, gather_again: Callable[[], None]) -> None:
        """Give the memory back before the last gradients come; whoever uses a parameter gathers the unit again.

        `free` ends this.
        """
        self.free()
        for tensors in self.chunks:
            for parameter in tensors.parameters:
                guard.await_on_use(parameter, gather_again)

    def drop_bytes(self) -> None:
        """Give back the memory of a freed unit, if nobody else holds a view of it."""
        if self.residence is Residence.FREED and self.memory is not None and not self.is_viewed:
            self.memory.untyped_storage().resize_(0)

    # -- reduce: partial -> G, when gradients are ready ------------------------------------------

    def reduce(self, bucket: Bucket, *, last: bool) -> Pending | None:
        """Start partial -> G for the gradients that autograd left in the parameters; missing ones count as zeros.

        last: the microbatch is the last of its step. With replicas its sums are summed between these too.
        """
        return self._reduce(self._stage.reduce, bucket, last=last)

    # -- hand_over: G -> O, before the optimizer's step ------------------------------------------

    @timed_as_verb("hand_over")
    def reduce_to_owner(self, bucket: Bucket, *, last: bool) -> Pending | None:
        """Start the part of `hand_over` that communicates: partial -> O, in place in the owner's span."""
        return self._reduce(self._stage.hand_over, bucket, last=last)

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
    def publish(self) -> None:
        """Start O -> P: masters become parameters everywhere. `arrive` ends it."""
        self.generation += 1
        for tensors in self.trainable:
            tensors.cast_masters()
        if self.is_sharded:
            self.offer()
        if self._stage.publish is Move.ALL_GATHER and self.trainable:
            self._become(Residence.GATHERING)
            self._arriving = self._wire.all_gather(self._parts_published, "publish", what=str(self))

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
        return self._stage.gather is Move.ALL_GATHER and bool(self.chunks)

    @property
    def reduces_at_hand_over(self) -> bool:
        """Whether gradients rest partial and are summed on the way to the optimizer."""
        return self._stage.hand_over is Move.REDUCE_SCATTER

    @property
    def is_viewed(self) -> bool:
        """Whether anybody but the engine and the unit's parameters holds a view of the full parameters."""
        if self.memory is None:
            return False
        shown = 0 if self.residence is Residence.FREED else len(list(self.parameters()))
        return torch._C._storage_Use_Count(self.storage) > self._own_uses + shown

    @property
    def is_pinned(self) -> bool:
        """Whether the parameters lie whole in memory of their own, see gathered.py."""
        return any(tensors.pinned is not None for tensors in self.chunks)

    @property
    def has_frozen(self) -> bool:
        return len(self.trainable) < len(self.chunks)

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
        return {
            "parameters": [t.piece if self.is_sharded else t.whole for t in self.chunks],
            "gradients": [held for each in self._gradients for held in each.held],
            "master": [t.master_flat for t in self.chunks if t.master_flat is not None],
            "buffers": [] if self.memory is None else [self.memory],
        }

    # -- where it lies ---------------------------------------------------------------------------

    def rest(self) -> None:
        """Take up the memory of full parameters that rest sharded, free it, and offer the pieces to peers.

        All ranks call it in one order, when the pieces have their values.
        """
        if not self.is_sharded:
            return
        starts = [0]
        for tensors in self.chunks:
            starts.append(aligned(starts[-1] + tensors.full_bytes))
        self._num_bytes = starts[-1]
        self.memory = torch.empty(
            self._num_bytes, dtype=torch.uint8, device=self._wire.world.device
        )
        for tensors, start in zip(self.chunks, starts, strict=False):
            tensors.place_in(self.memory[start : start + tensors.full_bytes])
        self._parts = [GatherPart(t.chunk, t.whole, t.piece) for t in self.chunks]
        self._become(Residence.FREED)
        self.show()
        self._own_uses = torch._C._storage_Use_Count(self.storage)
        self.drop_bytes()
        self.offer()

    @property
    def storage(self) -> int:
        """The address by which torch knows the storage of the full parameters."""
        assert self.memory is not None
        return self.memory.untyped_storage()._cdata

    def own_views(self) -> Iterator[Tensor]:
        """Yield the engine's tensors over the storage of the full parameters."""
        if self.memory is not None:
            yield self.memory
        for tensors, part in zip(self.chunks, self._parts, strict=True):
            yield from (tensors.whole, *tensors.views)
            if part.by_rank is not None:
                yield part.by_rank

    def offer(self) -> None:
        """Allow peers to gather this rank's pieces until the next optimizer step. All ranks call it in one order."""
        self._offer = self._wire.offer(self._parts, self._offer)

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

    def _reduce(self, move: Move, bucket: Bucket, *, last: bool) -> Pending | None:
        if move in (Move.NOTHING, Move.SLICE):
            return None
        if move is Move.REDUCE_SCATTER:
            parts = [self._gradients[part.index].to_scatter(part) for part in bucket.slices]
            return self._wire.reduce_scatter(parts, "reduce", str(self), last=last)
        sums = [self._gradients[part.index].to_sum(part) for part in bucket.slices]
        summed = self._wire.all_reduce([part for part, _ in sums], "reduce", str(self))

        def keep() -> None:
            for _, keep_one in sums:
                keep_one()

        return Pending([summed], keep)
