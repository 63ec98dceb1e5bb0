"""Gradients of one chunk, from where autograd leaves them to where the optimizer takes them.

    parameter.grad ──take──▶ whole gradient ──a bucket at a time──▶ sum of all ranks, where it rests

A whole gradient is dropped when the last of its elements is on its way, unless it rests partial. The reductions of a
microbatch cover each element once, so the number of reduced elements tells a first sum, which is written, from a later
one, which is added.

[Note: dtype of accumulation] bfloat16 keeps three digits of a sum, so what autograd adds up, over uses of a weight in a
forward and over backwards, it adds up in the dtype of the reduction. Where every microbatch is reduced, the gradient of
a weight that the graph of its loss uses once is no sum of autograd's: it stays as it comes, half the bytes, until it is
packed. Computed in bfloat16 and reduced in float32, it takes 2 bytes an element until then, and one that is used twice
takes 4. A hook computes with the wider one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.comm.base import ReducePart, part_of
from zeroexp.comm.collectives import Collectives
from zeroexp.cut.bucket import BucketPart
from zeroexp.cut.stage import Move, Placement, Stage
from zeroexp.zero.held import Held, unguarded
from zeroexp.zero.options import Dtypes

Keep = Callable[[], None]


class ChunkGradients:
    """All gradients of one chunk under one stage."""

    def __init__(
        self, held: Held, stage: Stage, dtypes: Dtypes, wire: Collectives, *, each_microbatch: bool
    ):
        """each_microbatch: it is reduced, so that nothing is added up in the parameters."""
        self._chunk = held.chunk
        self._parameters = held.parameters
        self._owned, self._summed = held.owned, held.summed
        self._elements_of, self._summed_of = held.elements_of, held.summed_of
        self._rank, self._device = wire.group.rank, wire.group.device
        self._scatters = stage.summing_move is Move.REDUCE_SCATTER
        self._rests = stage.gradients
        self._dtype = dtypes.reduce
        self._is_alone = wire.group.size == 1  # options.py, [Note: world of one]
        self._wide = torch.promote_types(dtypes.compute, dtypes.reduce)
        for parameter in self._parameters:
            parameter.grad_dtype = self._wide
        is_moved_on = each_microbatch and stage.gradients is Placement.SHARD and not self._is_alone
        # Whether gradients that are no sums keep the dtype of compute, see [Note: dtype of accumulation].
        self.has_two_dtypes = is_moved_on and dtypes.compute is not self._wide
        self._as_it_comes: list[nn.Parameter] = []  # those whose next gradient does
        self._whole: dict[int, Tensor] = {}  # whole gradients by member
        self._sums: dict[int, Tensor] = {}  # sums by summed span; all-reduced sums by member
        self._num_reduced = 0  # elements reduced since `clear`
        # For each parameter, whether it got a gradient on this rank since `clear`.
        self.present = [False] * len(self._parameters)

    @property
    def tensors(self) -> list[Tensor]:
        """All gradients of this chunk that exist now; some may share memory."""
        with unguarded():
            left = [p.grad for p in self._parameters if p.grad is not None]
        return [*left, *self._whole.values(), *self._sums.values()]

    def use_compute_dtype(self, uses: Mapping[int, int]) -> None:
        """Let the next gradients of parameters that are used once, no sums, stay in the dtype in which they come.

        uses: see `uses_of_leaves`.
        """
        with unguarded():
            for parameter in self._parameters:
                num_hooks = len(parameter._backward_hooks or ())
                num_hooks += len(parameter._post_accumulate_grad_hooks or ()) - 1  # one is ours
                if uses.get(id(parameter)) == 1 and parameter.grad is None and num_hooks <= 0:
                    parameter.grad_dtype = None
                    self._as_it_comes.append(parameter)

    def use_reduce_dtype(self) -> None:
        """Let autograd add up all gradients in the dtype of the reduction again."""
        with unguarded():
            for parameter in self._as_it_comes:
                gradient, parameter.grad = parameter.grad, None
                parameter.grad_dtype = self._wide
                parameter.grad = None if gradient is None else gradient.to(self._wide)
        self._as_it_comes.clear()

    def to_reduce(self, part: BucketPart) -> tuple[ReducePart, Keep]:
        """Return what a reduction of the part is given, and a call that keeps its sums once they are there."""
        return self._to_scatter(part) if self._scatters else self._to_sum(part)

    def _to_scatter(self, part: BucketPart) -> tuple[ReducePart, Keep]:
        """Return what partial -> sharded moves: the elements, and where this rank's share of their sum goes."""
        accumulate = self._count_reduced(part)
        terms = self._take_gradients(part)
        own_ranges = [self._elements_of(part, span) for span in part.chunk.spans(self._rank)]
        absent = [i for i, each in enumerate(part.ranges) if not self.present[each.member]]
        if not accumulate and self._rests is Placement.PARTIAL:
            for index, _ in own_ranges:  # zero1: sums lie in the whole gradients, which stay anyway
                span = self._summed[index]
                self._sums[index] = self._whole[span.member][span.start : span.stop]

        # Called when the message holds copies and the gradients are freed, see ReducePart.
        def allocate() -> list[Tensor]:
            if own_ranges and not self._sums:
                self._allocate_sums()
            return [part_of(self._sums[index], own.start, own.stop) for index, own in own_ranges]

        self._drop_reduced(part)
        given = ReducePart(
            part.chunk,
            terms,
            accumulate=accumulate,
            absent=absent,
            dtype=self._dtype,
            allocate=allocate,
        )
        return given, lambda: None  # the sums are where they rest

    def _to_sum(self, part: BucketPart) -> tuple[ReducePart, Keep]:
        """Return what partial -> replicated sums in place, and a call that keeps the sums once they are there."""
        accumulate = self._count_reduced(part)
        terms = self._take_gradients(part)
        whole = {each.member: self._whole[each.member] for each in part.ranges}
        self._drop_reduced(part)

        def keep() -> None:
            for each, term in zip(part.ranges, terms, strict=True):
                if accumulate:
                    self._sums[each.member][each.start : each.stop].add_(term)
                else:
                    self._sums[each.member] = whole[each.member]

        return ReducePart(part.chunk, terms), keep

    def owned(self) -> list[Tensor]:
        """Return the sums of the owned spans; where gradients rest replicated they are cut out of whole sums.

        Call it unguarded, as `_take`.
        """
        if self._is_alone:
            self._sums = {member: self._take(member) for member in range(len(self._parameters))}
            return [*self._sums.values()]
        assert self._num_reduced, f"{self._chunk}: no gradient was reduced since the last step"
        if self._rests is Placement.REPLICATE:
            return [self._sums[span.member][span.start : span.stop] for span in self._owned]
        starts = [
            span.start - self._summed[self._summed_of[span.member]].start for span in self._owned
        ]
        return [
            part_of(self._sums[self._summed_of[span.member]], start, start + span.numel)
            for span, start in zip(self._owned, starts, strict=True)
        ]

    def clear(self) -> None:
        self._whole.clear()
        self._sums.clear()
        self._num_reduced = 0
        self.present = [False] * len(self._parameters)
        with unguarded():
            for parameter in self._parameters:
                parameter.grad = None

    def _count_reduced(self, part: BucketPart) -> bool:
        """Count the elements of a reduction; return whether its sums are added to earlier ones."""
        accumulates = self._num_reduced >= self._chunk.unpadded_numel
        self._num_reduced += part.chunk.unpadded_numel
        return accumulates

    def _take_gradients(self, part: BucketPart) -> list[Tensor]:
        """Return views of each range's gradient; the parameters keep none."""
        with unguarded():
            for member in (each.member for each in part.ranges):
                if member not in self._whole:
                    self._whole[member] = self._take(member).reshape(-1)
                    self._parameters[member].grad = None
        return [part_of(self._whole[each.member], each.start, each.stop) for each in part.ranges]

    def _take(self, member: int) -> Tensor:
        """Return what autograd left in a parameter, or zeros; call it unguarded.

        In the reduce dtype, except where gradients stay in that of compute until they are packed.
        """
        gradient = self._parameters[member].grad
        if gradient is None:
            place = self._chunk.members[member]
            return torch.zeros(place.stop - place.start, dtype=self._dtype, device=self._device)
        self.present[member] = True
        if gradient.requires_grad:  # of a backward with create_graph=True
            gradient = gradient.detach()
        stays = gradient.dtype is self._dtype or self.has_two_dtypes
        if stays and gradient.layout is torch.strided:
            return gradient
        # A sparse embedding leaves a sparse gradient, whose rows are added up.
        return gradient.to(self._dtype).to_dense()

    def _drop_reduced(self, part: BucketPart) -> None:
        """Drop members that are all on their way: buckets come last range first, so a member's first range ends it."""
        if self._rests is Placement.PARTIAL:
            return
        for each in part.ranges:
            if each.start == 0:
                del self._whole[each.member]

    def _allocate_sums(self) -> None:
        sizes = [span.numel for span in self._summed]
        flat = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
        self._sums = dict(enumerate(flat.split(sizes) if len(sizes) > 1 else [flat]))


def uses_of_leaves(loss: Tensor) -> Counter[int]:
    """Count how often the graph of a loss uses each of its leaves, by the leaf's `id`.

    None are counted where a checkpoint hides others, as torch's reentrant one does.
    """
    uses = Counter[int]()
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return Counter()
        seen.add(node)
        following: Any
        for following, _ in node.next_functions:
            if following is not None and following.name() == "torch::autograd::AccumulateGrad":
                uses[id(following.variable)] += 1
            else:
                nodes.append(following)
    return uses
