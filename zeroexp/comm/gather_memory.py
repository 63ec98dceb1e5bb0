"""The memory in which gathered chunks lie: allocated by torch, or pages that each unit maps beside its own pieces."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zeroexp.comm.base import GatherPart, Pieces
from zeroexp.comm.paging import aligned, lies_on_pages, pages
from zeroexp.comm.stitching import Stretch, stitch
from zeroexp.cut.chunk import Chunk


def bytes_side_by_side(unit: Pieces) -> int:
    """Return the bytes of a unit whose full chunks lie side by side, each aligned."""
    return sum(aligned(chunk.padded_numel * piece.itemsize) for chunk, piece in unit)


def lay_side_by_side(unit: Pieces, memory: Tensor) -> list[GatherPart]:
    """Return the parts of a unit whose full chunks lie side by side in `memory`, flat uint8."""
    parts: list[GatherPart] = []
    start = 0
    for chunk, piece in unit:
        num_bytes = chunk.padded_numel * piece.itemsize
        full = memory[start : start + num_bytes].view(piece.dtype)
        parts.append(GatherPart(chunk, full, piece))
        start += aligned(num_bytes)
    return parts


class Allocated:
    """Memory of torch's allocator, as large as the largest of the units needs."""

    def __init__(self, units: Sequence[Pieces], device: torch.device) -> None:
        num_bytes = max(map(bytes_side_by_side, units), default=0)
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def lay(self, unit: Pieces) -> list[GatherPart]:
        return lay_side_by_side(unit, self.memory)


class Mapped:
    """Pages of a file, beside which every unit maps the sections that this rank owns, where those lie on pages.

    place_of: returns the open file behind a resting tensor, and the offset in it.
    """

    def __init__(
        self,
        units: Sequence[Pieces],
        rank: int,
        page_bytes: int,
        place_of: Callable[[Tensor], tuple[int, int]],
    ) -> None:
        self._rank, self._page_bytes, self._place_of = rank, page_bytes, place_of
        self._file = os.memfd_create("zeroexp-pool")
        weakref.finalize(self, os.close, self._file)
        num_bytes = max(map(self._bytes_of_others, units), default=0)
        os.ftruncate(self._file, num_bytes)
        whole = [Stretch(self._file, 0, num_bytes)]
        self.memory = stitch(whole) if num_bytes else torch.empty(0, dtype=torch.uint8)

    def lay(self, unit: Pieces) -> list[GatherPart]:
        if not unit:
            return []
        memory = stitch(self._stretches(unit))
        parts: list[GatherPart] = []
        start = 0
        for chunk, piece in unit:
            num_bytes = chunk.padded_numel * piece.itemsize
            full = memory[start : start + num_bytes].view(piece.dtype)
            parts.append(GatherPart(chunk, full, piece, in_place=self._in_place(chunk, piece)))
            start += pages(num_bytes, self._page_bytes)
        return parts

    def _bytes_of_others(self, unit: Pieces) -> int:
        return sum(part.num_bytes for part in self._stretches(unit) if part.file == self._file)

    def _stretches(self, unit: Pieces) -> list[Stretch]:
        """Return the stretches of these chunks: others' sections in the file, this rank's where it rests.

        Each chunk begins on a new page.
        """
        stretches: list[Stretch] = []
        taken = 0
        for chunk, piece in unit:
            num_bytes = pages(chunk.padded_numel * piece.itemsize, self._page_bytes)
            if self._in_place(chunk, piece):
                before = chunk.cuts[self._rank] * piece.itemsize
                stretches.append(Stretch(self._file, taken, before))
                stretches.append(Stretch(*self._place_of(piece), piece.nbytes))
                taken += before
                num_bytes -= before + piece.nbytes
            stretches.append(Stretch(self._file, taken, num_bytes))
            taken += num_bytes
        return [stretch for stretch in stretches if stretch.num_bytes]

    def _in_place(self, chunk: Chunk, piece: Tensor) -> bool:
        return lies_on_pages(chunk, self._rank, piece.itemsize, self._page_bytes)
