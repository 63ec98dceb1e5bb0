"""Tensors are copied into and out of a message in as few operations as there are, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroexp.comm.base import GatherPart, ReducePart, part_of
from zeroexp.comm.collective_layout import CollectiveLayout


def join_gradients(layout: CollectiveLayout, parts: Sequence[ReducePart]) -> None:
    """Bring each chunk's gradients together where `pack_gradients` needs that.

    Called before the message is allocated: gradients that rest nowhere are freed by it, so that two copies of them are
    held at a time and not three.
    """
    if not layout.is_table or layout.is_chunk:
        return
    for part in parts:
        if len(part.gradients) > 1:
            part.gradients[:] = [torch.cat(part.gradients)]
    if len({part.gradients[0].dtype for part in parts}) > 1:  # `_chunk_cat` takes one
        for part in parts:
            part.gradients[:] = [part.gradients[0].to(part.sent_dtype)]


def pack_gradients(layout: CollectiveLayout, message: Tensor, parts: Sequence[ReducePart]) -> None:
    """Copy the gradients, joined by `join_gradients`, into the message of any dtype; padding may hold anything."""
    if layout.is_table and not layout.is_chunk:
        chunks = [part.gradients[0] for part in parts]
        table = message.view(layout.num_ranks, -1)
        torch._chunk_cat(chunks, dim=0, num_chunks=layout.num_ranks, out=table)
        return
    sources = [
        part_of(parts[run.chunk].gradients[run.member], run.start, run.stop)
        for run in layout.members
    ]
    if sources:
        torch._foreach_copy_(views_of(message, [run.place for run in layout.members]), sources)


def pack_pieces(layout: CollectiveLayout, rank: int, parts: Sequence[GatherPart]) -> Tensor:
    """Return this rank's part of the message: the piece itself, or pieces and padding side by side."""
    pieces = [part.piece for part in parts]
    rest = layout.part_numel(rank) - sum(piece.numel() for piece in pieces)
    if rest:
        pieces.append(pieces[0].new_empty(rest))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def unpack_sections(layout: CollectiveLayout, message: Tensor, parts: Sequence[GatherPart]) -> None:
    """Copy every section of the message to its place in the full chunks."""
    rows = [part.by_rank for part in parts if part.by_rank is not None]
    if len(rows) == len(parts):
        widths = [row.shape[1] for row in rows]
        table = message.view(layout.num_ranks, sum(widths))
        torch.split_with_sizes_copy(table, widths, dim=1, out=rows)
        return
    targets = [part_of(parts[run.chunk].full, run.start, run.stop) for run in layout.sections]
    torch._foreach_copy_(targets, views_of(message, [run.place for run in layout.sections]))


def unpack_sums(
    own: Tensor, spans: Sequence[tuple[int, int]], outs: Sequence[tuple[Tensor, bool]]
) -> None:
    """Copy this rank's sums out of its part of the message, or add them to what lies there where that is True."""
    sums = list(zip(views_of(own, spans), outs, strict=True))
    for adds, put in ((True, torch._foreach_add_), (False, torch._foreach_copy_)):
        targets = [out for _, (out, accumulate) in sums if accumulate is adds]
        if targets:
            put(targets, [total for total, (_, accumulate) in sums if accumulate is adds])


def views_of(flat: Tensor, places: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return views of these elements of a flat tensor, in rising order; one operation makes them all."""
    lengths: list[int] = []
    kept: list[int] = []
    end = 0
    for start, stop in places:
        if start > end:
            lengths.append(start - end)
        kept.append(len(lengths))
        lengths.append(stop - start)
        end = stop
    parts = flat.split([*lengths, flat.numel() - end])
    return [parts[index] for index in kept]


def begin_alike(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors begin at one place of one storage, which tensors without memory have as well."""
    same = one.untyped_storage() is other.untyped_storage()
    return same and one.storage_offset() == other.storage_offset()
