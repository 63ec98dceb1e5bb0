"""A message of several chunks holds each rank's sections side by side, however many ranks there are."""

from __future__ import annotations

import pytest
import torch

from zeroexp.comm.message_layout import MANY_RANKS, message_layout_of
from zeroexp.cut.chunk import Chunk, ParameterSpec
from zeroexp.cut.layout import lay_out

SIZES = [7, 130, 1, 64, 4096 * 40 + 3]


def chunks_of(family: str, world_size: int, kinds: list[str]) -> tuple[Chunk, ...]:
    specs = [
        ParameterSpec(f"p{i}", numel, 4, kinds[i % len(kinds)]) for i, numel in enumerate(SIZES)
    ]
    return lay_out(family, [specs], world_size)[0]


def message_by_hand(chunks: tuple[Chunk, ...], flats: list[torch.Tensor]) -> torch.Tensor:
    """Pad each chunk, cut it for the ranks, and lay the sections of each rank side by side; padding is -1."""
    parts: list[torch.Tensor] = []
    for rank in range(len(chunks[0].cuts) - 1):
        for chunk, flat in zip(chunks, flats, strict=True):
            padded = torch.full((chunk.padded_numel,), -1.0)
            padded[: chunk.unpadded_numel] = flat
            parts.append(padded[chunk.section(rank)])
    return torch.cat(parts)


@pytest.mark.parametrize("world_size", [1, 3, MANY_RANKS - 1, MANY_RANKS, 1024])
@pytest.mark.parametrize("family", ["parameter", "tensor", "buffer"])
@pytest.mark.parametrize("kinds", [["a"], ["a", "b"]])
def test_gradients_are_packed_rank_by_rank(family, kinds, world_size):
    chunks = chunks_of(family, world_size, kinds)
    flats = [torch.arange(float(chunk.unpadded_numel)) + 1000 * i for i, chunk in enumerate(chunks)]
    gradients = [
        [flat[m.start : m.stop].clone() for m in chunk.members]
        for chunk, flat in zip(chunks, flats, strict=True)
    ]
    layout = message_layout_of(chunks)
    message = torch.full((layout.numel,), -1.0)
    layout.pack_gradients(message, gradients)
    assert message.equal(message_by_hand(chunks, flats))
    for rank in {0, world_size // 2, world_size - 1}:
        own = message.split(layout.numel_by_rank)[rank]
        spans = [
            flat[chunk.members[s.member].start + s.start :][: s.numel]
            for chunk, flat in zip(chunks, flats, strict=True)
            for s in chunk.spans(rank)
        ]
        found = layout.spans_of(rank, own)
        assert len(found) == len(spans)
        assert all(one.equal(other) for one, other in zip(found, spans, strict=True))
