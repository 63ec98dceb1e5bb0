"""Codecs against arithmetic: what codes stand for, how far it may lie from the values, what moves carry over a backend.

An integer code is off by half a step of its block at most. A float8 has three bits behind the point, so that it is off
by a sixteenth of its value at most, or by half of the smallest number, 2^-9, times the block's factor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.comm.asked import as_nccl, asking
from tests.comm.test_collectives import CASES, chunks_of, flat_of, gradients_of
from tests.crossed import crossed
from zeroexp.comm.base import GatherPart, ReducePart
from zeroexp.comm.codec import LARGEST, decode, encode
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.direct import sum_into
from zeroexp.comm.traits import MoveOptions
from zeroexp.cut.chunk import Chunk
from zeroexp.cut.codec_bytes import CODE_BITS, CODES_IN_BLOCK, encoded_bytes
from zeroexp.cut.stage import STAGES
from zeroexp.measure.tcp_bytes import wire_meter
from zeroexp.plan.sent_bytes import EngineForm
from zeroexp.process.world import World, barrier
from zeroexp.zero.options import Options

SIZES = (0, 1, 5, 127, 128, 129, 1000)


def round_trip(codec: str, values: Tensor) -> Tensor:
    return decode(codec, encode(codec, values)[None], values.numel(), values.dtype)[0]


@pytest.mark.parametrize("codec", CODE_BITS)
def test_each_element_is_off_by_half_a_step_at_most(codec):
    generator = torch.Generator().manual_seed(1)
    for numel in SIZES:
        values = (
            torch.randn(numel, generator=generator) * torch.logspace(-6, 6, max(numel, 1))[:numel]
        )
        got = round_trip(codec, values)
        assert len(encode(codec, values)) == encoded_bytes(codec, numel)
        for block, codes in zip(
            values.split(CODES_IN_BLOCK), got.split(CODES_IN_BLOCK), strict=True
        ):
            if not numel:
                continue
            factor = block.abs().max() / LARGEST[codec]
            bound = torch.full_like(block, float(factor) / 2)
            if codec == "float8":
                bound = torch.maximum(block.abs() / 16, factor * 2**-10)
            assert bool(((codes - block).abs() <= bound * (1 + 1e-5)).all()), numel
            at = block.abs().argmax()
            assert codes[at] == pytest.approx(block[at].item(), rel=1e-6), "the largest is exact"


@pytest.mark.parametrize("codec", CODE_BITS)
def test_zeros_stay_and_what_is_not_finite_spoils_its_block_and_no_other(codec):
    assert not round_trip(codec, torch.zeros(200)).any()
    for spoilt in (float("nan"), float("inf")):
        values = torch.ones(3 * CODES_IN_BLOCK)
        values[CODES_IN_BLOCK] = spoilt
        first, second, third = round_trip(codec, values).split(CODES_IN_BLOCK)
        assert second.isnan().all() and first.eq(1).all() and third.eq(1).all()


@pytest.mark.parametrize("codec", CODE_BITS)
def test_rows_are_decoded_as_each_alone_in_any_dtype(codec):
    rows = [flat_of(chunks_of("one-padded-buffer", 2)[0], seed, torch.bfloat16) for seed in (1, 2)]
    encoded = torch.stack([encode(codec, row) for row in rows])
    together = decode(codec, encoded, rows[0].numel(), torch.bfloat16)
    assert torch.equal(together, torch.stack([round_trip(codec, row) for row in rows]))


def check_moves(world: World, codec: str, transport: str) -> list[tuple[str, int, int, int, int]]:
    """For each case: (name, bytes of a gather counted and in closed form, bytes of a reduction counted and in form)."""
    if transport == "nccl":
        with asking():
            return check_moves(as_nccl(world), codec, "native")
    wire = Collectives(
        world, MoveOptions(transport=transport, gather_codec=codec, reduce_codec=codec)
    )
    wire.connect()
    found: list[tuple[str, int, int, int, int]] = []
    for case in CASES:
        chunks = chunks_of(case, world.size)
        codecs: dict[str, Any] = {"gather_codec": codec, "reduce_codec": codec}
        options, stage = Options(keep="all", **codecs), STAGES["zero3"]
        words = {"transport": wire.traits.name, "world_size": world.size}
        form = EngineForm([chunks], stage, options, **words)
        _gather(wire, world, codec, chunks)
        _reduce(wire, world, codec, chunks)
        counted = wire.take_traffic()
        of_form = form.traffic(world.rank).bytes_by_kind
        pairs = [(counted.bytes_by_kind[k], of_form[k]) for k in ("gather", "reduce")]
        found.append((case, *pairs[0], *pairs[1]))
        barrier()
    return found


def _gather(wire: Collectives, world: World, codec: str, chunks: tuple[Chunk, ...]) -> None:
    """Every rank gets what the codes of all sections stand for, its own as well; codes run over chunk borders."""
    parts: list[GatherPart] = []
    sections: list[list[Tensor]] = [[] for _ in range(world.size)]
    for chunk in chunks:
        whole = torch.zeros(chunk.padded_numel)
        whole[: chunk.unpadded_numel] = flat_of(chunk, 0, torch.float32)
        for rank, of_rank in enumerate(sections):
            of_rank.append(whole[chunk.section(rank)])
        parts.append(
            GatherPart(chunk, torch.full_like(whole, 7.0), whole[chunk.section(world.rank)])
        )
    wire.all_gather(parts, "gather").wait()
    for rank, of_rank in enumerate(sections):
        expected = round_trip(codec, torch.cat(of_rank)).split([len(each) for each in of_rank])
        got = [part.full[part.chunk.section(rank)] for part in parts]
        assert all(map(torch.equal, got, expected)), rank
    exact = [GatherPart(p.chunk, p.full.clone(), p.piece) for p in parts]
    wire.all_gather(exact, "exact", exact=True).wait()
    for part in exact:
        real = part.full[: part.chunk.unpadded_numel]
        assert torch.equal(real, flat_of(part.chunk, 0, torch.float32))


def _reduce(wire: Collectives, world: World, codec: str, chunks: tuple[Chunk, ...]) -> None:
    """The sum in rank order of what peers' codes stand for and of the own terms, which are exact."""
    ranks = range(world.size)
    gradients = [[gradients_of(chunk, rank, torch.float32) for chunk in chunks] for rank in ranks]
    for accumulate in (False, True):
        terms: list[list[Tensor]] = []
        for rank in ranks:
            spans = [
                gradients[rank][index][s.member][s.start : s.stop]
                for index, chunk in enumerate(chunks)
                for s in chunk.spans(world.rank)
            ]
            if rank != world.rank and spans:
                sizes = [len(span) for span in spans]
                spans = list(round_trip(codec, torch.cat(spans)).split(sizes))
            terms.append(spans)
        parts = [
            ReducePart(
                c,
                gradients[world.rank][i],
                [torch.ones(s.numel) for s in c.spans(world.rank)],
                accumulate,
            )
            for i, c in enumerate(chunks)
        ]
        expected = [torch.ones_like(term) for term in terms[0]]
        for index, out in enumerate(expected):
            sum_into(out, [terms[rank][index] for rank in ranks], accumulate)
        wire.reduce_scatter(parts, "reduce" if accumulate else "first").wait()
        assert all(map(torch.equal, (out for part in parts for out in part.out), expected))


# A codec says what a span is encoded to, a transport who gets it: each meets each, on two ranks or three.
MET = [
    (codec, transport, 2 + (row + column) % 2)
    for row, codec in enumerate(CODE_BITS)
    for column, transport in enumerate(("auto", "gloo", "native", "nccl"))
    if (row, transport) != (1, "nccl") and (row - column) % 3 == 0
]


@crossed(
    "codec, transport, world_size",
    CODE_BITS,
    ["auto", "gloo", "native", "nccl"],
    [2, 3],
    quick=lambda *each: each in MET,
)
def test_moves_carry_codes_and_are_counted_as_in_closed_form(ranks, codec, transport, world_size):
    for answers in ranks(check_moves, codec, transport, world_size=world_size):
        for case, gathered, in_form, reduced, in_form_too in answers:
            assert (gathered, reduced) == (in_form, in_form_too), case


def sent_on_the_wire(world: World, codec: str) -> tuple[int, int | None]:
    wire = Collectives(world, MoveOptions(transport="gloo", gather_codec=codec, reduce_codec=codec))
    wire.connect()
    _gather(wire, world, codec, chunks_of("one-padded-buffer", world.size))  # opens connections
    wire.take_traffic()
    barrier()
    meter = wire_meter(world.backend)
    _gather(wire, world, codec, chunks_of("long-segments", world.size))
    _reduce(wire, world, codec, chunks_of("long-segments", world.size))
    return sum(wire.take_traffic().bytes_by_kind.values()), meter.take_bytes()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_kernel_sends_what_is_counted(ranks, codec):
    for counted, sent in ranks(sent_on_the_wire, codec):
        assert counted <= sent <= 1.002 * counted  # gloo's headers
