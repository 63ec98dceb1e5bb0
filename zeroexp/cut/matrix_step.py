"""On which ranks a matrix is whole while an optimizer orthogonalizes it, where ranks hold pieces of it.

    step        it is whole on                  travels, in bfloat16, of a matrix that k ranks hold
    gather      each rank that has a piece      every piece to the k - 1 other ranks
    alltoall    one of these ranks              all other pieces to that rank, and as much of the result back

Of `alltoall` the ranks are balanced by the cost of orthogonalizing. A matrix that one rank holds whole, as all of the
layout `parameter` and many of a flat buffer, is stepped by its owner, and nothing of it travels. Only ranks that hold a
piece may have the whole: they know whether the matrix has a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeroexp.cut.chunk import Chunk

MATRIX_STEPS = ("gather", "alltoall")
ITEM_BYTES = 2  # of an element on its way: what is orthogonalized is bfloat16

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CutMatrix:
    """A matrix of which ranks hold pieces: which elements each has, and the ranks on which it becomes whole."""

    name: str
    shape: Shape
    pieces: Mapping[int, slice]  # by rank, of the flattened matrix
    whole_on: tuple[int, ...]
    over_all: bool = False  # of its chunk: what the ranks are numbered among

    @property
    def is_cut(self) -> bool:
        return len(self.pieces) > 1

    def piece_bytes(self, rank: int) -> int:
        piece = self.pieces.get(rank, slice(0, 0))
        return ITEM_BYTES * (piece.stop - piece.start)

    def bytes_to_whole(self, sender: int, receiver: int) -> int:
        """Return the bytes of the sender's piece, if the receiver is to have the whole."""
        sends = sender != receiver and receiver in self.whole_on
        return self.piece_bytes(sender) if sends else 0

    def bytes_back(self, sender: int, receiver: int) -> int:
        """Return the bytes of the result that a rank which had the whole returns to one that had not."""
        sends = sender == self.whole_on[0] and receiver not in self.whole_on
        return self.piece_bytes(receiver) if sends else 0


def cut_matrices(
    units: Sequence[Sequence[Chunk]], shapes: Mapping[str, Shape], step: str, kind: str
) -> list[list[CutMatrix]]:
    """Return the matrices that are whole at once, batch after batch: those of a unit, or, of `alltoall`, all of them.

    shapes: of each matrix by name. kind: of the chunks that an optimizer of whole matrices steps. A batch may hold
    matrices that no rank has to send.
    """
    batches = [
        [
            _held_by_all(chunk, index, shapes)
            for chunk in chunks
            for index in range(len(chunk.members))
        ]
        for chunks in ([c for c in unit if c.kind == kind] for unit in units)
        if chunks
    ]
    if step == "gather":
        return batches
    matrices = [matrix for batch in batches for matrix in batch]
    return [_give_to_one(matrices)] if matrices else []


def exchanges_of(batch: Sequence[CutMatrix]) -> int:
    """Return how often all ranks exchange for a batch: to the whole, and back where results return."""
    cut = [matrix for matrix in batch if matrix.is_cut]
    return bool(cut) + any(len(matrix.whole_on) < len(matrix.pieces) for matrix in cut)


def orthogonalizing_cost(shape: Shape) -> int:
    """Return half the operations of a Newton-Schulz iteration: the Gram matrix, its square, and their product.

    A taller matrix is transposed, so that the Gram matrix has the shorter side.
    """
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def _held_by_all(chunk: Chunk, index: int, shapes: Mapping[str, Shape]) -> CutMatrix:
    member = chunk.members[index]
    pieces = {
        rank: slice(start - member.start, stop - member.start)
        for rank, start, stop in chunk.shares(member.start, member.stop)
    }
    return CutMatrix(member.name, shapes[member.name], pieces, tuple(pieces), chunk.over_all)


def _give_to_one(matrices: Sequence[CutMatrix]) -> list[CutMatrix]:
    """Give each matrix to the least loaded rank that has a piece, the most expensive first; equal ones by their order.

    Among equally loaded ranks the one with the largest piece has it, since it sends the rest least.
    """
    loads: dict[int, int] = {}
    owners: dict[str, int] = {}
    for matrix in sorted(matrices, key=lambda m: (m.is_cut, -orthogonalizing_cost(m.shape))):
        owner = min(matrix.pieces, key=lambda r: (loads.get(r, 0), -matrix.piece_bytes(r)))
        owners[matrix.name] = owner
        loads[owner] = loads.get(owner, 0) + orthogonalizing_cost(matrix.shape)
    return [replace(m, whole_on=(owners[m.name],)) for m in matrices]
