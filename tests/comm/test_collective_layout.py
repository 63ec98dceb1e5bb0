"""A message of several chunks holds each rank's sections side by side, however many ranks there are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.crossed import crossed
from zeroexp.comm.base import GatherPart, ReducePart
from zeroexp.comm.collective_layout import OPERATION_BYTES, CollectiveLayout
from zeroexp.comm.packing import (
    join_gradients,
    pack_gradients,
    pack_pieces,
    unpack_sections,
    views_of,
)
from zeroexp.cut.chunk import Chunk, Member, ParameterSpec
from zeroexp.cut.layout import lay_out

SIZES = [7, 130, 1, 64, 4096 * 40 + 3]


def chunks_of(family: str, world_size: int, kinds: list[str]) -> tuple[Chunk, ...]:
    specs = [
        ParameterSpec(f"p{i}", numel, 4, kinds[i % len(kinds)]) for i, numel in enumerate(SIZES)
    ]
    return lay_out(family, [specs], world_size)[0]


def layout_of(chunks: tuple[Chunk, ...], in_rows: bool) -> CollectiveLayout:
    """The layout of float32, padded to rows or not."""
    layout = CollectiveLayout(chunks, 4)
    layout.__dict__["in_rows"] = in_rows
    return layout


def message_by_hand(
    layout: CollectiveLayout, flats: list[torch.Tensor], *, padding: float
) -> torch.Tensor:
    """Pad each chunk, cut it for the ranks, and lay the sections of each rank side by side."""
    parts: list[torch.Tensor] = []
    for rank in range(layout.num_ranks):
        part = torch.full((layout.part_numel(rank),), padding)
        at = 0
        for chunk, flat in zip(layout.chunks, flats, strict=True):
            real = flat[chunk.real_section(rank)]
            part[at : at + len(real)] = real
            at += chunk.section_numel(rank)
        parts.append(part)
    return torch.cat(parts)


def test_a_message_with_an_empty_column_is_no_table():
    """Replicas that share an optimizer may leave none of a chunk to a group."""
    full, empty = (Chunk((Member("p", 0, 2 * width),), (0, width, 2 * width)) for width in (4, 0))
    assert CollectiveLayout((full, full), 4).is_table
    assert not CollectiveLayout((full, empty), 4).is_table


@crossed(
    "family, kinds, world_size, dtype",
    ["parameter", "tensor", "buffer"],
    [["a"], ["a", "b"]],
    [1, 3, 127, 1024],
    [torch.float32, torch.bfloat16],
    quick=lambda family, kinds, size, _: size < 1024 and (size < 127 or len(kinds) == 2),
)
def test_gradients_are_packed_and_cast_and_sections_unpacked(family, kinds, world_size, dtype):
    """Gradients go into a message of zeros, and come out of it as gathered weights."""
    chunks = chunks_of(family, world_size, kinds)
    numbered = [torch.arange(float(c.unpadded_numel)) + 1000 * i for i, c in enumerate(chunks)]
    flats = [each.to(dtype).float() for each in numbered]
    for in_rows in [True, False] if family == "parameter" else [True]:
        layout = layout_of(chunks, in_rows)
        reduced = [
            ReducePart(chunk, [flat[m.start : m.stop].to(dtype) for m in chunk.members])
            for chunk, flat in zip(chunks, flats, strict=True)
        ]
        if family != "tensor" and len(kinds) == 1:
            assert len(layout.members) == len(SIZES)  # one copy each, however many ranks
        message = torch.zeros(layout.numel)
        join_gradients(layout, reduced)
        pack_gradients(layout, message, reduced)
        assert message.equal(message_by_hand(layout, flats, padding=0.0))
        check_parts(layout, message, flats)


def check_parts(layout: CollectiveLayout, message: torch.Tensor, flats: list[torch.Tensor]) -> None:
    fulls = [torch.zeros(chunk.padded_numel) for chunk in layout.chunks]
    for rank in {0, layout.num_ranks // 2, layout.num_ranks - 1}:
        start, stop = layout.part(rank)
        spans = [
            flat[chunk.members[s.member].start + s.start :][: s.numel]
            for chunk, flat in zip(layout.chunks, flats, strict=True)
            for s in chunk.spans(rank)
        ]
        found = views_of(message[start:stop], layout.spans(rank))
        assert len(found) == len(spans)
        assert all(one.equal(other) for one, other in zip(found, spans, strict=True))
        pieces = [
            GatherPart(chunk, full, torch.zeros(chunk.section_numel(rank)))
            for chunk, full in zip(layout.chunks, fulls, strict=True)
        ]
        for part, flat in zip(pieces, flats, strict=True):
            real = flat[part.chunk.real_section(rank)]
            part.piece[: len(real)] = real
        packed = pack_pieces(layout, rank, pieces)
        used = sum(part.piece.numel() for part in pieces)
        assert packed.numel() == stop - start
        assert packed[:used].equal(message[start:stop][:used])
    parts = [GatherPart(c, full, full[:0]) for c, full in zip(layout.chunks, fulls, strict=True)]
    unpack_sections(layout, message, parts)
    for chunk, full, flat in zip(layout.chunks, fulls, flats, strict=True):
        assert full[: chunk.unpadded_numel].equal(flat)


@pytest.mark.parametrize("world_size", [2, 8, 64, 1024])
def test_parts_are_padded_where_that_takes_less_time_than_an_operation_each(world_size):
    """An owner costs an operation, worth OPERATION_BYTES of the link; a row costs its padding."""
    ways = set[bool]()
    limit = OPERATION_BYTES // 4
    for sizes in ([16] * 6, [1 << 20] * 6, [limit + 1, 1], [limit + 2, 1]):
        specs = [ParameterSpec(str(i), numel, 4) for i, numel in enumerate(sizes)]
        layout = CollectiveLayout(lay_out("parameter", [specs], world_size)[0], 4)
        (chunk,) = layout.chunks
        lengths = [end - start for start, end in pairwise(chunk.cuts)]
        in_rows = 4 * world_size * max(lengths)
        one_by_one = 4 * sum(lengths) + OPERATION_BYTES * (sum(map(bool, lengths)) - 1)
        assert layout.in_rows is (in_rows <= one_by_one)
        assert 4 * layout.numel == (in_rows if layout.in_rows else 4 * sum(lengths))
        assert layout.part_numel(0) == (max(lengths) if layout.in_rows else lengths[0])
        ways.add(layout.in_rows)
    assert ways == {True, False}
