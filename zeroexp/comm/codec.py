"""Codecs: what travels between ranks takes fewer bytes than what is computed with, and is rounded for it.

    codec      a block of 128 elements                                          bytes an element, for 4 of float32
    int8       128 integers, and the float32 by which they are multiplied       1.03
    float8     128 numbers of float8_e4m3fn, and such a factor                  1.03
    int4       64 bytes of two integers, and such a factor                      0.53

The factor is the largest absolute value of the block over the largest number of the code, so that nothing overflows;
what is not finite makes its whole block nan. Equal values have equal codes on every rank and in every run.

A gather carries codes, and every rank computes with what they stand for, the owner of a section as well: all see the
same weights. They are made for each gather, or once a step where parameters rest as codes. A reduction carries each
rank's terms as codes to the rank that sums them, in rank order and in the dtype of the sum. That rank's own terms
travel nowhere and stay exact. What the optimizer keeps, and so every checkpoint, never passes a codec.

With error feedback (arXiv:1901.09847, 1-bit Adam) a rank keeps what rounding leaves out of each gradient that it sends,
and adds it to the next one, so that in the long run nothing is left out. Where it has no gradient it sends none of it.

ZeRO++ (arXiv:2306.10209) calls the first qwZ; the second is qgZ in one hop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeroexp.comm.base import GatherPart, Pending, ReducePart, Residuals, Sent, Transport, spans_of
from zeroexp.comm.direct import sum_into
from zeroexp.cut.chunk import Chunk
from zeroexp.cut.codec_bytes import CODE_BITS, CODES_IN_BLOCK, encoded_bytes, encoded_chunk
from zeroexp.process.world import World

LARGEST = {"int8": 127.0, "float8": 448.0, "int4": 7.0}  # number of each code
OFFSET_INT4 = 8  # makes an int4 a number without sign


def encode(codec: str, values: Tensor) -> Tensor:
    """Return the codes of a flat tensor and then the factors of its blocks, [encoded_bytes(...)] of uint8."""
    blocks = pad(values.float(), (0, -values.numel() % CODES_IN_BLOCK)).view(-1, CODES_IN_BLOCK)
    factors = blocks.abs().amax(1, keepdim=True).div_(LARGEST[codec])
    # A block of zeros is not divided by zero.
    factors.clamp_(min=torch.finfo(torch.float32).tiny)
    numbers = blocks / factors
    dtype = torch.float8_e4m3fn if codec == "float8" else torch.int8
    codes = (numbers if codec == "float8" else numbers.round_()).to(dtype)
    if codec == "int4":
        low, high = (codes + OFFSET_INT4).view(torch.uint8).view(-1, 2).unbind(1)
        codes = low | high << 4
    return torch.cat([codes.view(torch.uint8).view(-1), factors.view(torch.uint8).view(-1)])


def decode(codec: str, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the values that each row of `encoded` stands for: [rows, encoded_bytes(...)] -> [rows, numel]."""
    num_rows, num_blocks = len(encoded), -(-numel // CODES_IN_BLOCK)
    codes, factors = encoded.split(
        [num_blocks * CODES_IN_BLOCK * CODE_BITS[codec] // 8, num_blocks * 4], dim=1
    )
    if codec == "float8":
        numbers = codes.view(torch.float8_e4m3fn).float()
    elif codec == "int8":
        numbers = codes.view(torch.int8).float()
    else:
        numbers = torch.stack([codes & 15, codes >> 4], dim=2).float().sub_(OFFSET_INT4)
    blocks = numbers.view(num_rows, num_blocks, CODES_IN_BLOCK)
    blocks *= factors.view(torch.float32).unsqueeze(2)
    return blocks.view(num_rows, -1)[:, :numel].to(dtype)


def encode_pieces(codec: str, parts: Sequence[GatherPart]) -> Tensor:
    """Return the codes of this rank's pieces, side by side."""
    return encode(codec, torch.cat([part.piece for part in parts]))


def encoded_part(
    codec: str, parts: Sequence[GatherPart], resting: Tensor | None = None
) -> GatherPart:
    """Return what an all-gather of these parts moves: the codes of this rank's pieces, and room for those of all.

    resting: these codes, where they rest.
    """
    codes = encode_pieces(codec, parts) if resting is None else resting
    return GatherPart(_chunk_of_codes(codec, parts), empty_codes(codec, parts), codes)


def empty_codes(codec: str, parts: Sequence[GatherPart]) -> Tensor:
    """Return room for the codes of all ranks' pieces."""
    numel = _chunk_of_codes(codec, parts).padded_numel
    return parts[0].full.new_empty(numel, dtype=torch.uint8)


def decode_gathered(codec: str, codes: Tensor, parts: Sequence[GatherPart]) -> None:
    """Write what the codes of all ranks' pieces stand for into `full` of every part."""
    chunk = _chunk_of_codes(codec, parts)
    num_ranks = len(chunk.cuts) - 1
    if all(part.by_rank is not None for part in parts):
        _decode_into(codec, codes.view(num_ranks, -1), [part.by_rank for part in parts])
        return
    for rank in range(num_ranks):
        sections = [part.full[part.chunk.section(rank)].unsqueeze(0) for part in parts]
        _decode_into(codec, codes[chunk.section(rank)].unsqueeze(0), sections)


def _chunk_of_codes(codec: str, parts: Sequence[GatherPart]) -> Chunk:
    return encoded_chunk(codec, tuple(part.chunk for part in parts))


def new_error_feedback(world: World, chunks: Sequence[Chunk]) -> Residuals:
    """Return what the rounding of these chunks' gradients has left out so far: nothing, of float32, by peer."""
    peers = (rank for rank in range(world.size) if rank != world.rank)
    numels = {peer: sum(chunk.real_numel(peer) for chunk in chunks) for peer in peers}
    place = {"dtype": torch.float32, "device": world.device}
    return {peer: torch.zeros(numel, **place) for peer, numel in numels.items()}


def reduce_scatter_encoded(
    transport: Transport,
    codec: str,
    world: World,
    parts: Sequence[ReducePart],
    what: str,
    residuals: Residuals | None = None,
) -> Sent:
    """Start a reduce-scatter of which each rank's terms travel as codes to the rank that sums them.

    residuals: are added to the terms, and become what the codes leave out of the sum.
    """
    peers = [rank for rank in range(world.size) if rank != world.rank]
    # A peer may own nothing of these parts.
    nothing = parts[0].gradients[0].new_empty(0, dtype=parts[0].sent_dtype)
    sent: dict[int, Tensor] = {}
    for peer in peers:
        terms = torch.cat([nothing, *_as_sent(parts, peer)])
        if residuals is None:
            sent[peer] = encode(codec, terms)
        else:
            sent[peer] = _encode_with_feedback(codec, terms, residuals[peer], parts, peer)
    own = _as_sent(parts, world.rank)
    outs = [(out, part.accumulate) for part in parts for out in part.sums()]
    sizes = [term.numel() for term in own]
    expected = dict.fromkeys(peers, encoded_bytes(codec, sum(sizes)))
    arriving, received = transport.exchange(sent, expected, what)

    def add_in_rank_order() -> None:
        terms: dict[int, Sequence[Tensor]] = {world.rank: own}
        for peer in peers:
            values = decode(codec, received[peer].unsqueeze(0), sum(sizes), nothing.dtype)
            terms[peer] = values.view(-1).split(sizes)
        for index, (out, accumulate) in enumerate(outs):
            sum_into(out, [terms[rank][index] for rank in range(world.size)], accumulate)

    return Pending([arriving], add_in_rank_order), sum(map(len, sent.values()))


def _as_sent(parts: Sequence[ReducePart], owner: int) -> list[Tensor]:
    return [term.to(parts[0].sent_dtype) for term in spans_of(parts, owner)]


def _encode_with_feedback(
    codec: str, terms: Tensor, residual: Tensor, parts: Sequence[ReducePart], peer: int
) -> Tensor:
    """Return the codes of terms and residual, which becomes what they leave out.

    Where this rank has no gradient the residual waits: if no rank has one, the owner drops the sum.
    """
    spans = [(span, part.absent) for part in parts for span in part.chunk.spans(peer)]
    by_span = residual.split([span.numel for span, _ in spans])
    absent = [
        left for left, (span, members) in zip(by_span, spans, strict=True) if span.member in members
    ]
    waiting = [left.clone() for left in absent]
    fed = residual.add_(terms)
    for left in absent:
        left.zero_()
    codes = encode(codec, fed)
    fed.sub_(decode(codec, codes.unsqueeze(0), len(fed), fed.dtype)[0])
    for left, kept in zip(absent, waiting, strict=True):
        left.copy_(kept)
    return codes


def _decode_into(codec: str, encoded: Tensor, targets: Sequence[Tensor | None]) -> None:
    """Decode rows of codes into tables of as many rows, which lie side by side in them."""
    tables = [target for target in targets if target is not None]
    widths = [table.shape[1] for table in tables]
    values = decode(codec, encoded, sum(widths), tables[0].dtype)
    torch._foreach_copy_(tables, list(values.split(widths, dim=1)))
