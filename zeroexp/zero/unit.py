"""A unit is a set of parameters that move together; its five verbs are gather, free, reduce, hand_over, publish.

held.py draws what a rank holds of a unit. cut/stage.py derives from the stage what each verb does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeroexp.comm.base import GatherPart, Pending
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.secondary import SecondaryCopy
from zeroexp.comm.traits import ON_DEVICE, ON_HOST
from zeroexp.cut.bucket import Bucket, cut_in_buckets
from zeroexp.cut.chunk import Chunk
from zeroexp.cut.stage import Move, Stage
from zeroexp.measure.communication_overlap import meter
from zeroexp.process.world import World
from zeroexp.zero.full_storage import FullStorage
from zeroexp.zero.gradients import ChunkGradients
from zeroexp.zero.held import MAY_BECOME, GatherState, Held, unguarded
from zeroexp.zero.options import Dtypes


class OptimizerInput(NamedTuple):
    """What the optimizer is given for one span that this rank updates."""

    parameter: nn.Parameter
    master: nn.Parameter  # the elements that this rank updates
    gradient: Tensor  # the sum over ranks, of the master's shape, and its dtype where no bus is between them
    shared_by: World  # the ranks that update it by the same gradient


class Unit:
    """One set of parameters under one stage. The verbs stand in the order of the step."""

    def __init__(
        self,
        name: str,
        held: list[Held],
        stage: Stage,
        dtypes: Dtypes,
        wire: Collectives,
        bucket_bytes: int | None = None,
        *,
        each_microbatch: bool = False,
    ):
        """One reduction takes at most `bucket_bytes`, or the whole unit where that is None.

        each_microbatch: gradients are reduced by it, and not by the step.
        """
        self.name = name
        self.is_root = not name
        self.held = held
        self.gather_state = GatherState.READY
        # Whether parameters lie whole in memory of their own (gathered_parameters.py).
        self.is_pinned = False
        # Whether parameters that rest replicated are on their way though the step has ended (Options.publish).
        self.is_awaited = False
        self.is_sharded = stage.gather is Move.ALL_GATHER and bool(held)
        self.full: FullStorage | None = None  # of the full parameters, where they rest sharded
        self.secondary: SecondaryCopy | None = None  # for gathers inside of the node
        self._codes: Tensor | None = None  # of this rank's pieces, where they rest and are gathered
        self.generation = 0  # number of optimizer steps that the weights have taken
        self.trainable = [each for each in held if each.is_trainable]
        self.parameters = [parameter for each in held for parameter in each.parameters]
        self.trainable_parameters = [p for held in self.trainable for p in held.parameters]
        # Each parameter with the master weights that this rank updates of it, by chunk.
        self._updated = [[*held.parameters_with_masters()] for held in self.trainable]
        # One rank's gradients are the sums already: options.py, [Note: world of one].
        self.reduces = bool(self.trainable) and wire.group.size > 1
        # Gradients that rest partial are summed on the way to the optimizer.
        self.reduces_for_hand_over = stage.hand_over is Move.REDUCE_SCATTER
        self._scatters = stage.summing_move is Move.REDUCE_SCATTER
        self._gathers_published = stage.publish is Move.ALL_GATHER and bool(self.trainable)
        self._wire = wire
        self._exposure: int | None = None
        self._arriving: Pending | None = None
        # What is gathered: of parameters that rest whole after a step, so that `rest` makes those of sharded ones.
        self._parts = [
            GatherPart(h.chunk, h.full, h.piece) for h in self.trainable if h.full is not None
        ]
        self.gradients = [
            ChunkGradients(h, stage, dtypes, wire, each_microbatch=each_microbatch)
            for h in self.trainable
        ]
        cut = partial(cut_in_buckets, itemsize=dtypes.reduce.itemsize, max_bytes=bucket_bytes)
        self.buckets = cut([held.chunk for held in self.trainable])
        self._casts = [*self._masters_to_cast()]
        # By bucket, the chunk of each slice by which replicas cut their sums of it; None: each takes all of it.
        self._shares: list[list[Chunk | None]] = [[] for _ in self.buckets]
        self._parts_between: list[GatherPart] = []  # pieces of which replicas update shares
        if wire.shares_updates:
            self._cut_between_replicas(cut([held.fine for held in self.trainable]))
        # By bucket, what rounding left out of gradients that this rank has sent, in float32.
        scattered = self.buckets if self._scatters else []
        chunks = ([part.chunk for part in bucket.parts] for bucket in scattered)
        self._residuals = [wire.new_error_feedback(each) for each in chunks]

    def _cut_between_replicas(self, buckets: Sequence[Bucket]) -> None:
        """Cut, where replicas share the optimizer (over=all), each bucket's sums and the pieces that they update.

        buckets: of chunks that are cut for all ranks that update them.
        """
        rank, size = self._wire.group.rank, self._wire.group.size

        def share(chunk: Chunk) -> Chunk | None:
            return chunk.within(rank, size) if chunk.over_all else None

        self._shares = [[share(part.chunk) for part in bucket.parts] for bucket in buckets]
        self._parts_between = [
            GatherPart(held.fine.within(rank, size), held.piece, held.owned_memory)
            for held in self.trainable
            if held.fine.over_all
        ]

    def _masters_to_cast(self) -> Iterator[tuple[int, list[Tensor], list[nn.Parameter]]]:
        """Yield by place the owned elements and their masters, where these have another dtype or place."""
        bus = self._wire.bus
        for place in (ON_DEVICE, ON_HOST):
            there = [h for h in self.trainable if bus.has_masters(h.chunk) == place and h.elements]
            if there:
                masters = [master for held in there for master in held.masters]
                yield place, [each for held in there for each in held.elements], masters

    def __repr__(self) -> str:
        return f"unit {self.name or '(root)'}"

    def rest(self) -> None:
        """Free full parameters that rest sharded, and expose the pieces to peers.

        All ranks call it in one order, when the pieces have their values.
        """
        if not self.is_sharded:
            return
        self._become(GatherState.FREED)
        self.show()
        self.full = FullStorage(self.held, self._wire.world.device)
        self._parts = self.full.parts
        self.secondary = self._wire.secondary_copy(self._parts)
        self.expose()

    # -- gather: P -> replicate, before forward and before backward ------------------------------

    def gather(self) -> None:
        """Start P -> replicate; `arrive` ends it. With a secondary copy of these weights no other node is asked."""
        assert self.full is not None
        copy, what = self.secondary, str(self)
        if copy is not None and copy.is_current:
            with meter.timing("secondary", what):
                self.full.take_up()
                self._arriving = self._wire.gather_in_node(self._parts, copy, what)
        else:
            with meter.timing("gather", what):
                self.full.take_up()
                self._arriving = self._wire.all_gather(
                    self._parts, "gather", self._exposure, what, codes=self._codes, secondary=copy
                )
        self._become(GatherState.GATHERING)  # where memory has run out it is freed as before

    def arrive(self) -> None:
        """Return when nothing is in flight, and show the full parameters to the module."""
        if self._arriving is not None:
            self.wait()
            self._arriving = None
            self._become(GatherState.READY)
            if self.is_sharded or self.is_awaited:
                self.is_awaited = False
                self.show()

    def wait(self) -> None:
        """Return when nothing is in flight; what has arrived is not shown yet."""
        if self._arriving is not None:
            self._arriving.wait()

    # -- free: replicate -> P, after forward and after backward ----------------------------------

    def free(self) -> None:
        """Carry out replicate -> P."""
        self.arrive()
        if self.gather_state is GatherState.READY:
            self._become(GatherState.FREED)
            self.show()
        assert self.full is not None
        self.full.drop()

    # -- reduce: partial -> G, when gradients are ready ------------------------------------------

    def reduce(self, bucket: Bucket, *, last: bool) -> Pending:
        """Start partial -> G for the gradients that autograd left in the parameters; missing ones count as zeros.

        Where gradients rest partial (zero1) this is the reduce-scatter of hand_over, begun beside backward; sums are
        written into the whole gradients.
        last: the microbatch is the last of its step. With replicas its sums are summed between these too.
        """
        with meter.timing("hand_over" if self.reduces_for_hand_over else "reduce", str(self)):
            given = [self.gradients[part.index].to_reduce(part) for part in bucket.parts]
            parts, keeps = [part for part, _ in given], [keep for _, keep in given]
            if self._scatters:
                index = self.buckets.index(bucket)
                left_out, shares = self._residuals[index], self._shares[index]
                summed = self._wire.reduce_scatter(
                    parts, "reduce", str(self), last=last, residuals=left_out, shares=shares
                )
            else:
                summed = self._wire.all_reduce(parts, "reduce", str(self))

        def keep() -> None:
            for keep_one in keeps:
                keep_one()

        return Pending([summed], keep)

    # -- hand_over: G -> O, before the optimizer's step ------------------------------------------

    def hand_over(self) -> list[OptimizerInput]:
        """Carry out G -> O: return each master weight with its gradient, in its dtype if on its device.

        Nothing is sent here: where G -> O is a reduce-scatter (zero1), `reduce` ran it beside the last backward.
        """
        bus, handed = self._wire.bus, list[OptimizerInput]()
        chunks = zip(self.trainable, self._updated, self.gradients, strict=True)
        for held, updated, gradients in chunks:
            for (parameter, master), gradient in zip(updated, gradients.owned(), strict=True):
                if gradient.dtype is not master.dtype and bus.place_of(master) == ON_DEVICE:
                    gradient = gradient.to(master.dtype)
                if gradient.shape != master.shape:
                    gradient = gradient.view(master.shape)
                handed.append(OptimizerInput(parameter, master, gradient, held.shared_by))
        return handed

    # -- publish: O -> P, after the optimizer's step ---------------------------------------------

    @property
    def publishes(self) -> bool:
        """Whether anything is to be done after a step: elsewhere masters are the parameters' own memory."""
        copies = bool(self._casts or self._parts_between)
        return copies or self.is_sharded or self._gathers_published

    def publish(self) -> None:
        """Start O -> P: masters become parameters everywhere. `arrive` ends it."""
        self.generation += 1
        with meter.timing("publish", str(self)):
            for place, elements, masters in self._casts:
                with torch.no_grad(), unguarded():
                    self._wire.bus.write_parameters(elements, masters, place)
            if self._parts_between:  # pieces are exposed below
                self._wire.gather_between(self._parts_between, str(self)).wait()
            self.expose()
            if self.secondary is not None:
                self.secondary.is_current = False
            if self._gathers_published:
                self._become(GatherState.GATHERING)
                self._arriving = self._wire.all_gather(
                    self._parts, "publish", self._exposure, str(self)
                )

    def zero_grad(self) -> None:
        for gradients in self.gradients:
            gradients.clear()

    def forget_residuals(self) -> None:
        """Begin as if no gradient had been rounded yet."""
        for tensor in self._left_out():
            tensor.zero_()

    def _left_out(self) -> list[Tensor]:
        return [tensor for each in self._residuals if each for tensor in each.values()]

    # -- what it shows and holds -----------------------------------------------------------------

    def show(self) -> None:
        """Point the parameters at the memory that holds their values, or at no memory where none does."""
        for held in self.held:
            held.show(there=self.gather_state is GatherState.READY)

    def expose(self) -> None:
        """Allow peers to gather this rank's pieces until the next optimizer step. All ranks call it in one order."""
        if not (self.is_sharded or self._gathers_published):
            return
        self._exposure = self._wire.expose(self._parts, self._exposure)
        self._codes = None  # those of the step before go first
        self._codes = self._wire.codes_at_rest(self._parts)

    def gather_into(self, fulls: list[Tensor]) -> None:
        """Gather the full parameters into other memory, one flat tensor a chunk; the unit stays as it is."""
        held = zip(self.held, fulls, strict=True)
        parts = [GatherPart(h.chunk, full, h.piece) for h, full in held]
        self._wire.all_gather(parts, "gather", self._exposure, str(self), exact=True).wait()

    def states(self) -> dict[str, list[Tensor]]:
        """Return the tensors that exist now, by kind of memory."""
        return {
            "parameters": [*self._at_rest()],
            "gradients": [tensor for each in self.gradients for tensor in each.tensors],
            "master": [h.master_flat for h in self.held if h.master_flat is not None],
            "secondary": [] if self.secondary is None else self.secondary.kept,
            "buffers": [*self._left_out(), *([] if self.full is None else [self.full.memory])],
        }

    def _at_rest(self) -> Iterator[Tensor]:
        """Yield what parameters rest in; pieces that are masters rest as the unit's codes."""
        if self._codes is not None:
            yield self._codes
        for held in self.held:
            if held.piece is not held.master_flat:
                yield held.piece if self.is_sharded else held.whole

    def parameters_with_masters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return each parameter with the master weights that this rank updates of it."""
        return [pair for updated in self._updated for pair in updated]

    def buckets_of_parameters(self) -> list[list[int]]:
        """Return for each trainable parameter the indices of the buckets that hold elements of it."""
        firsts = [*accumulate((len(held.parameters) for held in self.trainable), initial=0)]
        found: list[list[int]] = [[] for _ in self.trainable_parameters]
        for index, bucket in enumerate(self.buckets):
            parts = bucket.parts
            for member in {
                firsts[part.index] + each.member for part in parts for each in part.ranges
            }:
                found[member].append(index)
        return found

    def _become(self, gather_state: GatherState) -> None:
        if gather_state not in MAY_BECOME[self.gather_state]:
            raise RuntimeError(
                f"{self} is {self.gather_state.value} and can not become {gather_state.value}"
            )
        self.gather_state = gather_state
