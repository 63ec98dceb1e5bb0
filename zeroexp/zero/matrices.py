"""Matrices of which ranks hold pieces, brought together while the optimizer steps: cut/matrix_step.py says where.

    momentum of pieces ──to the whole──▶ function(whole) ──back, of alltoall──▶ update of pieces

What the optimizer keeps stays in pieces, so that a checkpoint knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroexp.comm.collectives import Collectives
from zeroexp.cut.chunk import MATRIX
from zeroexp.cut.matrix_step import CutMatrix, cut_matrices, exchanges_of
from zeroexp.cut.stage import Placement, Stage
from zeroexp.interface.whole_matrices import Function, WholeMatrices
from zeroexp.zero.unit import Unit


def bring_matrices_together(
    optimizer: Optimizer, units: Sequence[Unit], stage: Stage, wire: Collectives, step: str
) -> None:
    """Let an optimizer of whole matrices have those of which this rank's masters are pieces."""
    is_cut = stage.optimizer is Placement.SHARD and (wire.group.size > 1 or wire.shares_updates)
    if is_cut and hasattr(optimizer, "matrices"):
        if wire.bus.is_used:
            raise ValueError(
                f"options.offload: {type(optimizer).__name__} steps whole matrices, whose pieces would travel from "
                "host to host; leave it None"
            )
        optimizer.matrices = MatricesOfUnits(units, wire, step)  # pyright: ignore[reportAttributeAccessIssue]


class MatricesOfUnits(WholeMatrices):
    """The matrices of which the ranks that update hold pieces; ranks are numbered as in `Updating`."""

    def __init__(self, units: Sequence[Unit], wire: Collectives, step: str, kind: str = MATRIX):
        self._of_engine = units, wire, step
        held = [held for unit in units for held in unit.trainable if held.chunk.kind == kind]
        updating = wire.updating(over_all=any(each.fine.over_all for each in held))
        self._wire, self._updating, self._rank = wire, updating, updating.number
        self._peers = [rank for rank in range(len(updating.ranks)) if rank != self._rank]
        self._shapes = {
            member.name: tuple(shape)
            for each in held
            for member, shape in zip(each.chunk.members, each.shapes, strict=True)
        }
        self._names = {
            master: each.chunk.members[span.member].name
            for each in held
            for span, master in each.weights()
        }
        chunks = [[each.fine for each in unit.trainable] for unit in units]
        self._batches = cut_matrices(chunks, self._shapes, step, kind)
        if any(map(exchanges_of, self._batches)):
            wire.open_exchanges(updating)

    def of_kind(self, kind: str) -> MatricesOfUnits:
        return MatricesOfUnits(*self._of_engine, kind)

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        return self._shapes[self._names[tensor]]

    def apply(
        self, function: Function, tensors: Sequence[Tensor], values: Sequence[Tensor]
    ) -> list[Tensor]:
        names = [self._names[tensor] for tensor in tensors]
        given = {name: value.view(-1) for name, value in zip(names, values, strict=True)}
        results: dict[str, Tensor] = {}
        for batch in self._batches:
            results |= self._apply_to(batch, function, given)
        pairs = zip(names, values, strict=True)
        return [results[name].view(value.shape) for name, value in pairs]

    def _apply_to(
        self, batch: Sequence[CutMatrix], function: Function, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return this rank's piece of each result; a matrix without a gradient is in no rank's `given`."""
        here = [matrix for matrix in batch if matrix.name in given]
        num_exchanges = exchanges_of(batch)
        arrived: Mapping[int, Sequence[Tensor]] = {}
        if num_exchanges:
            arrived = self._exchange(here, CutMatrix.bytes_to_whole, lambda m, _: given[m.name])
        wholes: dict[str, Tensor] = {}
        for index, matrix in enumerate(here):
            if self._rank in matrix.whole_on:
                pieces = {rank: of_matrices[index] for rank, of_matrices in arrived.items()}
                whole = _joined(matrix, {**pieces, self._rank: given[matrix.name]})
                wholes[matrix.name] = function(whole.view(matrix.shape)).reshape(-1)
        back: Mapping[int, Sequence[Tensor]] = {}
        if num_exchanges > 1:
            back = self._exchange(
                here, CutMatrix.bytes_back, lambda m, p: wholes[m.name][m.pieces[p]]
            )
        return {
            m.name: wholes[m.name][m.pieces[self._rank]]
            if m.name in wholes
            else back[m.whole_on[0]][index]
            for index, m in enumerate(here)
        }

    def _exchange(
        self,
        matrices: Sequence[CutMatrix],
        num_bytes: Callable[[CutMatrix, int, int], int],
        piece_for: Callable[[CutMatrix, int], Tensor],
    ) -> dict[int, Sequence[Tensor]]:
        """Send each peer its pieces of these matrices, and return those of each peer, one for each matrix or empty."""
        rank, device = self._rank, self._wire.world.device
        nothing = torch.empty(0, dtype=torch.bfloat16, device=device)
        sent = {
            peer: torch.cat(
                [nothing, *(piece_for(m, peer) for m in matrices if num_bytes(m, rank, peer))]
            ).view(torch.uint8)
            for peer in self._peers
        }
        sizes = {peer: [num_bytes(m, peer, rank) for m in matrices] for peer in self._peers}
        expected = {peer: sum(each) for peer, each in sizes.items()}
        arriving, received = self._wire.exchange(
            sent, expected, "matrices", "the optimizer", self._updating
        )
        arriving.wait()
        return {
            peer: [piece.view(torch.bfloat16) for piece in received[peer].split(sizes[peer])]
            for peer in self._peers
        }


def _joined(matrix: CutMatrix, pieces: Mapping[int, Tensor]) -> Tensor:
    if not matrix.is_cut:
        return next(iter(pieces[rank] for rank in matrix.pieces))
    return torch.cat([pieces[rank] for rank in matrix.pieces])
