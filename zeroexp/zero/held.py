"""What a rank holds of one chunk: its piece, the gathered parameters, the master weights.

Rank 1 of 4 holds this ('#' real memory, '.' not held):

    parameters rest sharded     full  . . . .  (# # # # only while gathered)      piece  # (its quarter)
    parameters rest replicated  full  # # # #                                     piece  = full[section 1]
    master of another dtype     one flat tensor over the spans the optimizer owns here; so is one on the host
    master of the same dtype    views of piece / full
    parameters rest as codes    piece in the master's dtype, masters are its views; the unit has the codes (unit.py)

Where the optimizer rests over all ranks of several groups, masters are of a share of the piece (comm/replicas.py):

    rank 1 of two groups of 2   piece  # #  is cut for its group (`chunk`); master  #  is cut for all (`fine`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from zeroexp.comm.collectives import Collectives
from zeroexp.cut.bucket import BucketPart
from zeroexp.cut.chunk import FROZEN, Chunk, Span
from zeroexp.cut.stage import Placement, Stage
from zeroexp.interface.values import Read
from zeroexp.process.world import World
from zeroexp.zero.options import Dtypes

# The engine's own code reads parameters under this context: an observer may have given them a class that raises.
unguarded = torch._C.DisableTorchFunctionSubclass


class GatherState(Enum):
    """What memory the parameters of a unit occupy."""

    FREED = "freed"  # only this rank's piece exists
    GATHERING = "gathering"  # a collective is writing the full parameters
    READY = "ready"  # the full parameters can be used


# What a unit may become. GATHERING follows READY where masters are published into parameters that rest replicated.
MAY_BECOME = {
    GatherState.FREED: (GatherState.GATHERING,),
    GatherState.GATHERING: (GatherState.READY,),
    GatherState.READY: (GatherState.FREED, GatherState.GATHERING),
}


@dataclass
class Held:
    """The tensors of one chunk on this rank."""

    chunk: Chunk
    parameters: list[nn.Parameter]  # the members, in order
    shapes: list[torch.Size]
    piece: Tensor  # this rank's section, flat, compute dtype; where codes rest, the master's
    owned_memory: Tensor  # flat, which offsets of `owned` index: the piece, or all parameters
    owned: tuple[Span, ...]  # the elements whose weight this rank keeps: its own, or all
    shared_by: World  # the ranks with the same weights and optimizer state of it
    # Where the optimizer rests over all ranks of several groups, two differ from the above, and else do not.
    summed: tuple[Span, ...]  # the elements whose gradients it sums in its group: `owned`, or more
    fine: Chunk  # the chunk cut for every rank that updates it: `chunk`, or cut finer
    report: Callable[..., None]  # the observer's `showing`
    device: torch.device  # of full parameters
    dtype: torch.dtype  # of full parameters
    master_dtype: torch.dtype  # of what is frozen, that of full parameters
    masters: list[nn.Parameter] = field(default_factory=list)  # one for each owned span
    master_flat: Tensor | None = None  # the masters' memory, where it is not the parameters' own
    # Views of the owned elements in the masters' shapes, where a step casts masters into them; made once.
    elements: list[Tensor] = field(default_factory=list[Tensor])
    full: Tensor | None = None  # flat and padded; None until the unit rests
    views: list[Tensor] = field(default_factory=list)  # views of full, one for each parameter
    shown: list[Tensor] = field(default_factory=list)  # what each parameter points at
    # A copy of full in memory of its own, while `whole` shows it (gathered_parameters.py).
    pinned: Tensor | None = None
    # What parameters show while freed: one nan in their shape, so that C++ code, which no guard sees, makes nan of it.
    nan_views: list[Tensor] = field(init=False)
    # Index of the summed span, and of the owned one, by member: a rank has at most one span of a member.
    summed_of: dict[int, int] = field(init=False)
    owned_of: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self.nan_views = [nan.expand(shape) for shape in self.shapes]
        self.summed_of = {span.member: index for index, span in enumerate(self.summed)}
        self.owned_of = {span.member: index for index, span in enumerate(self.owned)}

    @property
    def is_trainable(self) -> bool:
        """Whether the chunk was trainable when the engine was built; a parameter frozen later gets no gradient."""
        return self.chunk.kind != FROZEN

    @property
    def whole(self) -> Tensor:
        """The full parameters, flat and padded: those that are shown."""
        whole = self.full if self.pinned is None else self.pinned
        assert whole is not None
        return whole

    @property
    def full_bytes(self) -> int:
        return self.chunk.padded_numel * self.dtype.itemsize

    def place_in(self, full: Tensor) -> None:
        """Let the full parameters lie in `full`: flat, padded, of any dtype."""
        self.full = full = full.view(self.dtype)
        self.views = self.views_of(full)

    def views_of(self, full: Tensor) -> list[Tensor]:
        """Return a view of each parameter, in its shape, of a flat tensor that holds the chunk."""
        return [
            full[member.start : member.stop].view(shape)
            for member, shape in zip(self.chunk.members, self.shapes, strict=True)
        ]

    def show(self, *, there: bool) -> None:
        """Point the parameters at their values, or at `nan_views` where the values are not there."""
        there = there or self.pinned is not None
        self.report(self, there=there)
        views = self.nan_views
        if there:
            views = self.views if self.pinned is None else self.views_of(self.pinned)
        if views is not self.shown:
            self.point_at(views)

    def point_at(self, views: list[Tensor]) -> None:
        """Point each parameter at its view."""
        with unguarded():
            for parameter, view in zip(self.parameters, views, strict=True):
                parameter.data = view
        self.shown = views

    def own_elements(self) -> Iterator[tuple[Span, Tensor]]:
        """Yield each owned span with the memory of its elements, flat, in the dtype of the piece."""
        return ((s, self.owned_memory[s.offset : s.offset + s.numel]) for s in self.owned)

    def weights(self) -> Iterator[tuple[Span, Tensor]]:
        """Yield each owned span with its weights: the master, or what rests here of a frozen parameter."""
        return (
            zip(self.owned, self.masters, strict=True) if self.is_trainable else self.own_elements()
        )

    def parameters_with_masters(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield each parameter with the master weights that this rank updates of it."""
        for span, master in zip(self.owned, self.masters, strict=self.is_trainable):
            yield self.parameters[span.member], master

    def elements_of(self, part: BucketPart, span: Span) -> tuple[int, slice]:
        """Return the index of the summed span in which this span of a bucket's slice lies, and its elements there."""
        each = part.ranges[span.member]
        index = self.summed_of[each.member]
        start = each.start + span.start - self.summed[index].start
        return index, slice(start, start + span.numel)

    @torch.no_grad()
    def write_parameter(self, member: int, read: Read) -> None:
        """Copy the values of one parameter to its masters, and to where they rest as these would publish them."""

        def rounded(start: int, stop: int) -> Tensor:
            values = read(start, stop)
            return values if self.master_dtype is self.dtype else values.to(self.master_dtype)

        if self.full is not None:
            place = self.chunk.members[member]
            self.full[place.start : place.stop].copy_(rounded(0, place.stop - place.start))
        elif member in self.summed_of:
            span = self.summed[self.summed_of[member]]
            self.piece[span.offset : span.offset + span.numel].copy_(rounded(span.start, span.stop))
        if self.master_flat is not None and member in self.owned_of:
            index = self.owned_of[member]
            span, master = self.owned[index], self.masters[index].detach()
            master.view(-1).copy_(read(span.start, span.stop))


def allocate(
    fine: Chunk,
    named: Mapping[str, nn.Parameter],
    stage: Stage,
    dtypes: Dtypes,
    wire: Collectives,
    report: Callable[..., None],
) -> Held:
    """Make the memory in which one chunk rests, filled with zeros, and its masters.

    fine: the chunk, cut for all ranks that update it.
    """
    rank, chunk = wire.group.rank, fine.for_ranks(wire.group.size)
    parameters = [named[member.name] for member in chunk.members]
    shapes = [parameter.shape for parameter in parameters]
    full = None
    is_master = wire.masters_rest and chunk.kind != FROZEN
    if stage.parameters is Placement.SHARD:
        dtype = dtypes.master_of(chunk) if is_master else dtypes.compute
        piece = wire.empty_piece(chunk, dtype).zero_()
    else:
        full = wire.empty(chunk.padded_numel, dtypes.compute).zero_()
        piece = full[chunk.section(rank)]
    kept = stage.parameters if chunk.kind == FROZEN else stage.optimizer
    updating = wire.updating(over_all=fine.over_all)
    memory, owned, summed = full, chunk.whole(), chunk.whole()
    if kept is Placement.SHARD:
        number = updating.number
        start, own = chunk.section(rank).start, fine.section(number)
        memory = piece[own.start - start : own.stop - start]
        owned, summed = fine.spans(number), chunk.spans(rank)
    assert memory is not None, "what is sharded is kept sharded"
    held = Held(
        chunk=chunk,
        parameters=parameters,
        shapes=shapes,
        piece=piece,
        owned_memory=memory,
        owned=owned,
        summed=summed,
        fine=fine,
        shared_by=updating.twins if kept is Placement.SHARD else wire.world,
        report=report,
        device=wire.world.device,
        dtype=dtypes.compute,
        master_dtype=dtypes.compute if chunk.kind == FROZEN else dtypes.master_of(chunk),
        full=full,
    )
    if held.is_trainable:
        _make_masters(held, dtypes, wire)
    if is_master:
        held.master_flat = piece
    return held


def _make_masters(held: Held, dtypes: Dtypes, wire: Collectives) -> None:
    """Make masters: views of the parameters' own memory where dtypes and devices agree, else memory of their own."""
    values: Sequence[Tensor] = [elements for _, elements in held.own_elements()]
    on_host = wire.bus.has_masters(held.chunk)
    lies_apart = on_host and not wire.bus.keeps_pieces
    master = dtypes.master_of(held.chunk)
    if (master is not held.piece.dtype or lies_apart) and values:
        sizes = [span.numel for span in held.owned]
        empty = wire.bus.empty if on_host else held.piece.new_empty
        held.master_flat = empty(sum(sizes), dtype=master)
        values = held.master_flat.split(sizes)
    for value, span in zip(values, held.owned, strict=True):
        shape = held.shapes[span.member]
        # A parameter that is owned whole keeps its shape, so that optimizers of matrices work.
        whole = span.numel == shape.numel()
        # `.data` gives it a version counter of its own, which only writes into the master advance.
        held.masters.append(nn.Parameter((value.view(shape) if whole else value).data))
    wire.bus.connect(held.chunk, held.masters, dtypes.compute, dtypes.reduce)
    if held.master_flat is not None:
        pairs = zip(held.own_elements(), held.masters, strict=True)
        held.elements = [elements.view(master.shape) for (_, elements), master in pairs]
