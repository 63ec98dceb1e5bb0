"""The three moves over real ranks: values to the bit, bytes as counted, as in closed form and as on the wire.

`direct` (shared memory) and `gloo` (messages) sum in rank order, so that they equal one process exactly. `native`
leaves the order to the backend: exact for two ranks, where there is one order, and for more equal up to the rounding
of another order of sums.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, reduce
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.comm.asked import Call, as_nccl, asking
from tests.crossed import crossed
from zeroexp.comm.base import GatherPart, ReducePart
from zeroexp.comm.collectives import TRANSPORTS, Collectives
from zeroexp.comm.direct import Direct
from zeroexp.comm.native import Native
from zeroexp.comm.shared_memory_sizes import slot_bytes
from zeroexp.comm.traits import MoveOptions
from zeroexp.cut.chunk import Chunk, ParameterSpec
from zeroexp.cut.layout import lay_out
from zeroexp.cut.stage import STAGES
from zeroexp.measure.tcp_bytes import wire_meter
from zeroexp.plan.form_terms import PrecisionForm
from zeroexp.plan.sent_bytes import EngineForm
from zeroexp.process import progress
from zeroexp.process import world as worlds
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World, barrier, current, fake_world, leave_process_group

SEGMENT_BYTES = 4 << 20  # longer messages travel in segments
# Elements of float32: more than a segment for each of three ranks, and the least that is not packed with others.
LONG = 3 * SEGMENT_BYTES // 4 + 13
PACKED = (32 << 10) // 4

# family and sizes of parameters
CASES = {
    "one-padded-buffer": ("buffer", [10, 7, 2]),
    # These are smaller than the world and packed together.
    "tiny-tensors": ("tensor", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    "around-the-packing-limit": ("tensor", [2 * PACKED - 2, 2 * PACKED, 6 * PACKED + 2, 5]),
    "uneven-owners": ("parameter", [1000, 3, 20_000, 17]),
    "one-owner-for-all": ("parameter", [5]),  # everyone else's section is empty
    # Padding would take longer than an operation for each owner.
    "one-large-owner": ("parameter", [9, 300_000, 20]),
    "long-segments": ("buffer", [LONG, 100]),
}


def chunks_of(case: str, world_size: int) -> tuple[Chunk, ...]:
    family, numels = CASES[case]
    specs = [ParameterSpec(str(i), numel, 4) for i, numel in enumerate(numels)]
    return lay_out(family, [specs], world_size, owners="contiguous")[0]


def flat_of(chunk: Chunk, seed: int, dtype: torch.dtype) -> Tensor:
    """Different values in every chunk, reproducible on every rank. To be read only: drawn once for all who ask."""
    return _drawn(chunk.unpadded_numel, seed, dtype)


# Millions of numbers take longer to draw than to move. Six are what three ranks give in two dtypes.
@lru_cache(maxsize=6)
def _drawn(numel: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + numel)
    return torch.randn(numel, generator=generator).to(dtype)


def members(chunk: Chunk, flat: Tensor) -> list[Tensor]:
    return [flat[member.start : member.stop] for member in chunk.members]


def gradients_of(chunk: Chunk, rank: int, dtype: torch.dtype) -> list[Tensor]:
    return [part.clone() for part in members(chunk, flat_of(chunk, rank, dtype))]


def sum_in_rank_order(chunk: Chunk, size: int, dtype: torch.dtype) -> list[Tensor]:
    total = flat_of(chunk, 0, dtype)
    for rank in range(1, size):
        total = total + flat_of(chunk, rank, dtype)
    return members(chunk, total)


def same(got: Tensor, expected: Tensor, exact: bool) -> None:
    """Sums here stay below 16, so each of two roundings is off by half of 16 eps at most."""
    tolerance = 0 if exact else 16 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def make(world: World, transport: str, case: str) -> tuple[Collectives, tuple[Chunk, ...]]:
    wire, chunks = Collectives(world, MoveOptions(transport=transport)), chunks_of(case, world.size)
    rest = [4 * chunk.padded_numel for chunk in chunks] * 2  # a gather is checked twice
    wire.connect()
    wire.reserve(rest, slot_bytes([chunks], STAGES["ddp"], world.rank, 4))
    return wire, chunks


def check_gather(world: World, transport: str, case: str, dtype: torch.dtype) -> int:
    """Pieces lie in the whole or, as where parameters rest sharded, apart from it. Returns the bytes counted."""
    wire, chunks = make(world, transport, case)
    for apart in (False, True):
        parts: list[GatherPart] = []
        for chunk in chunks:
            full = wire.empty(chunk.padded_numel, dtype).fill_(7.0)
            section, real = chunk.section(world.rank), chunk.real_section(world.rank)
            piece = full[section]
            if apart:
                full, piece = torch.full_like(full, 7.0), full[: section.stop - section.start]
            piece.zero_()
            piece[: real.stop - real.start] = flat_of(chunk, 0, dtype)[real]
            parts.append(GatherPart(chunk, full, piece))
        wire.all_gather(parts, "publish").wait()
        for part in parts:
            same(part.full[: part.chunk.unpadded_numel], flat_of(part.chunk, 0, dtype), exact=True)
        num_bytes = counted(wire, "publish")
    return num_bytes


def check_reduce_scatter(world: World, transport: str, case: str, dtype: torch.dtype) -> int:
    """Into memory apart, in place of the gradients, and added to what lies there."""
    wire, chunks = make(world, transport, case)
    exact = transport != "native" or world.size <= 2
    for way in ("apart", "in place", "added"):
        parts: list[ReducePart] = []
        for chunk in chunks:
            gradients = gradients_of(chunk, world.rank, dtype)
            spans = chunk.spans(world.rank)
            out = [gradients[s.member][s.start : s.stop] for s in spans]
            if way != "in place":
                out = [torch.ones_like(span) for span in out]
            parts.append(ReducePart(chunk, gradients, out, way == "added"))
        wire.reduce_scatter(parts, "reduce").wait()
        for part in parts:
            expected = sum_in_rank_order(part.chunk, world.size, dtype)
            for span, out in zip(part.chunk.spans(world.rank), part.out, strict=True):
                term = expected[span.member][span.start : span.stop]
                same(out, term + 1 if way == "added" else term, exact)
        num_bytes = counted(wire, "reduce")
    return num_bytes


def check_cast_sums(world: World, transport: str, case: str) -> int:
    """Gradients of bfloat16 are summed in float32, as are those that one rank has cast before."""
    wire, chunks = make(world, transport, case)
    half, full = torch.bfloat16, torch.float32
    own = full if world.rank == 1 else half
    for added in (False, True):
        parts: list[ReducePart] = []
        for chunk in chunks:
            gradients = [each.to(own) for each in gradients_of(chunk, world.rank, half)]
            out = [torch.ones(span.numel) for span in chunk.spans(world.rank)]
            parts.append(ReducePart(chunk, gradients, out, added, dtype=full))
        storages = [StorageWeakRef(g.untyped_storage()) for part in parts for g in part.gradients]
        pending = wire.reduce_scatter(parts, "reduce")
        for part in parts:
            part.gradients.clear()
        del gradients
        if own is half:  # each rank's share is a copy: a view would hold what others own
            assert all(storage.expired() for storage in storages)
        pending.wait()
        for part in parts:
            flats = [flat_of(part.chunk, rank, half).float() for rank in range(world.size)]
            expected = members(part.chunk, reduce(torch.add, flats) + added)
            for span, out in zip(part.chunk.spans(world.rank), part.out, strict=True):
                term = expected[span.member][span.start : span.stop]
                same(out, term, exact=transport != "native" or world.size <= 2)
        num_bytes = counted(wire, "reduce")
    return num_bytes


def cast_sums(world: World, transport: str) -> dict[str, int]:
    return {c: check_cast_sums(world, transport, c) for c in CASES if c != "long-segments"}


@pytest.mark.parametrize("transport", ["direct", "gloo", "native"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_cast_on_their_way(ranks, world_size, transport):
    for rank, counted_bytes in enumerate(ranks(cast_sums, transport, world_size=world_size)):
        for case, num_bytes in counted_bytes.items():
            form = EngineForm(
                [chunks_of(case, world_size)],
                STAGES["zero2"],
                world_size=world_size,
                transport=transport,
                precision=PrecisionForm("bfloat16", "float32", "float32"),
            )
            assert num_bytes == form.traffic(rank).bytes_by_kind["reduce"], case


def check_all_reduce(world: World, transport: str, case: str, dtype: torch.dtype) -> int:
    wire, chunks = make(world, transport, case)
    exact = transport != "native" or world.size <= 2
    parts = [ReducePart(chunk, gradients_of(chunk, world.rank, dtype)) for chunk in chunks]
    wire.all_reduce(parts, "reduce").wait()
    for part in parts:
        expected = sum_in_rank_order(part.chunk, world.size, dtype)
        for got, term in zip(part.gradients, expected, strict=True):
            same(got, term, exact)
    return counted(wire, "reduce")


def sum_of_an_owner(world: World, transport: str) -> list[Tensor]:
    """The sum over two replicas of two ranks of a chunk that one rank of each owns: the other has nothing to sum."""
    wire = Collectives(world, MoveOptions(transport=transport, replicas=2))
    wire.connect()
    (chunk,) = chunks_of("one-owner-for-all", 2)
    wire.reserve([], slot_bytes([[chunk]], STAGES["zero2"], wire.group.rank, 4), 64)
    out = [torch.empty(span.numel) for span in chunk.spans(wire.group.rank)]
    part = ReducePart(chunk, gradients_of(chunk, world.rank, torch.float32), out)
    wire.reduce_scatter([part], "reduce").wait()
    wire.finish_sums()
    wire.quiesce()
    barrier()
    return out


@pytest.mark.parametrize("transport", ["direct", "gloo", "native"])
def test_replicas_sum_what_a_rank_owns_nothing_of(ranks, transport):
    (chunk,) = chunks_of("one-owner-for-all", 2)
    expected = sum_in_rank_order(chunk, 4, torch.float32)
    for rank, sums in enumerate(ranks(sum_of_an_owner, transport, world_size=4)):
        for got, span in zip(sums, chunk.spans(rank % 2), strict=True):
            same(got, expected[span.member][span.start : span.stop], exact=False)


def counted(wire: Collectives, kind: str) -> int:
    """Ends the check: no rank closes its connections while another still reads."""
    wire.quiesce()
    barrier()
    traffic = wire.take_traffic()
    assert traffic.calls_by_kind == {kind: 1}
    return traffic.bytes_by_kind[kind]


CHECKS = {"gather": check_gather, "scatter": check_reduce_scatter, "all_reduce": check_all_reduce}
FORMS = {
    "gather": ("zero2", "publish"),
    "scatter": ("zero2", "reduce"),
    "all_reduce": ("ddp", "reduce"),
}


def check_all(world: World, name: str, transport: str) -> list[tuple[str, int, int]]:
    """(what, bytes counted, bytes the closed form says) of each case and dtype."""
    if transport == "nccl":
        with asking():
            return check_all(as_nccl(world), name, "native")
    stage, kind = FORMS[name]
    found: list[tuple[str, int, int]] = []
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            # Messages alone travel in segments, and in bfloat16 a rank's part is not long.
            if case == "long-segments" and (transport != "gloo" or dtype != torch.float32):
                continue
            form = EngineForm(
                [chunks_of(case, world.size)],
                STAGES[stage],
                world_size=world.size,
                transport=transport,
                precision=PrecisionForm(*[str(dtype).removeprefix("torch.")] * 3),
            )
            counted_bytes = CHECKS[name](world, transport, case, dtype)
            # One rank reduces nothing.
            form_bytes = form.traffic(world.rank).bytes_by_kind.get(kind, 0)
            found.append((f"{case} {dtype}", counted_bytes, form_bytes))
    return found


# What two ranks do wrong, three do too, but for a ring of two, whose sums are exact.
@crossed(
    "name, transport, world_size",
    CHECKS,
    ["direct", "gloo", "native", "nccl"],
    [1, 2, 3],
    quick=lambda name, transport, world_size: (
        world_size == 3 or (transport, world_size) in (("direct", 1), ("native", 2))
    ),
)
def test_values_and_counted_bytes(ranks, name, transport, world_size):
    for answers in ranks(check_all, name, transport, world_size=world_size):
        for what, counted_bytes, form_bytes in answers:
            assert counted_bytes == form_bytes, what


def ask_for_each_move(world: World) -> list[list[Call]]:
    wire = Collectives(world, MoveOptions(transport="native"))
    with asking() as asked:
        for case in CASES:
            chunks = chunks_of(case, world.size)
            wholes = [torch.zeros(chunk.padded_numel) for chunk in chunks]
            pairs = list(zip(chunks, wholes, strict=True))
            gathered = [GatherPart(c, whole, whole[c.section(world.rank)]) for c, whole in pairs]
            wire.all_gather(gathered, "gather").wait()
            outs = [[whole[: s.numel] for s in c.spans(world.rank)] for c, whole in pairs]
            reduced = [ReducePart(c, members(c, whole)) for c, whole in pairs]
            wire.all_reduce(reduced, "reduce").wait()
            for part, out in zip(reduced, outs, strict=True):
                part.out = out
            wire.reduce_scatter(reduced, "reduce").wait()
    return asked.launches


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_fake_world_is_asked_for_what_real_ranks_with_nccl_are(ranks, world_size):
    asked_of_nccl = ranks(ask_as_nccl, world_size=world_size)
    for rank, asked in enumerate(asked_of_nccl):
        with fake_world(rank, world_size) as world:
            assert asked == ask_for_each_move(world)
        assert {call.name for launch in asked for call in launch} >= {"broadcast", "reduce"}


def groups_of_calls(world: World) -> dict[str, set[str]]:
    wire = Collectives(as_nccl(world), MoveOptions(transport="native", reductions_apart=True))
    wire.connect()
    (chunk,) = chunks_of("one-large-owner", world.size)
    with asking() as asked:
        gradients = gradients_of(chunk, world.rank, torch.float32)
        out = [torch.empty(span.numel) for span in chunk.spans(world.rank)]
        part = ReducePart(chunk, gradients, out)
        pending = wire.reduce_scatter([part], "reduce")
        full = torch.zeros(chunk.padded_numel)
        wire.all_gather([GatherPart(chunk, full, full[chunk.section(world.rank)])], "gather").wait()
        pending.wait()
    return asked.groups


def test_reductions_may_have_a_communicator_of_their_own(ranks):
    one, other = ranks(groups_of_calls)
    assert one == other
    assert one["broadcast"].isdisjoint(one["reduce"])
    with fake_world(0, 2) as world, pytest.raises(ValueError, match="over gloo no move waits"):
        Collectives(world, MoveOptions(transport="gloo", reductions_apart=True))


def ask_as_nccl(world: World) -> list[list[Call]]:
    return ask_for_each_move(as_nccl(world))


def _check_float32(world: World, name: str, transport: str, case: str) -> int:
    return CHECKS[name](world, transport, case, torch.float32)


def bytes_on_the_wire(world: World, name: str, transport: str) -> tuple[int, int | None]:
    _check_float32(world, name, transport, "one-padded-buffer")  # connections are open now
    barrier()
    meter = wire_meter(world.backend)
    num_bytes = _check_float32(world, name, transport, "long-segments")
    return num_bytes, meter.take_bytes()


@pytest.mark.parametrize(("name", "moves"), [("gather", 2), ("scatter", 3), ("all_reduce", 1)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_counted_bytes_are_those_on_the_wire(ranks, name, moves, world_size):
    """Up to gloo's headers: less than 200 bytes each, one with a message and one when its receiver is ready."""
    for counted_bytes, wire_bytes in ranks(bytes_on_the_wire, name, "gloo", world_size=world_size):
        num_messages = (world_size - 1) * moves * 2 * (LONG * 4 // SEGMENT_BYTES + 2)
        assert 0 <= wire_bytes - moves * counted_bytes <= 2 * 200 * num_messages
        assert wire_bytes <= 1.001 * moves * counted_bytes


@pytest.mark.parametrize("name", CHECKS)
def test_neighbours_read_memory_and_send_nothing(ranks, name):
    """What is left are the few messages with which the ranks of one host find each other, and barriers."""
    for counted_bytes, wire_bytes in ranks(bytes_on_the_wire, name, "direct"):
        assert counted_bytes > 5_000_000
        assert wire_bytes < 10_000


def moves_in_flight_together(world: World, transport: str) -> None:
    """Two gathers and a sum on their way at once, waited for in another order than they began."""
    wire = Collectives(world, MoveOptions(transport=transport))
    (chunk,) = chunks_of("one-padded-buffer", world.size)
    wire.connect()
    wire.reserve(2 * [4 * chunk.padded_numel], 1000)
    fulls, pendings = [], []
    for seed in (1, 2):
        full = wire.empty(chunk.padded_numel, torch.float32).zero_()
        full[chunk.real_section(world.rank)] = flat_of(chunk, seed, full.dtype)[
            chunk.real_section(world.rank)
        ]
        fulls.append(full)
        part = GatherPart(chunk, full, full[chunk.section(world.rank)])
        pendings.append(wire.all_gather([part], "gather"))
    reduced = ReducePart(chunk, gradients_of(chunk, world.rank, torch.float32))
    pendings.append(wire.all_reduce([reduced], "reduce"))
    for index in (2, 0, 1) if world.rank == 0 else (1, 2, 0):
        pendings[index].wait()
        pendings[index].wait()  # a second wait changes nothing
    for seed, full in zip((1, 2), fulls, strict=True):
        same(full[: chunk.unpadded_numel], flat_of(chunk, seed, full.dtype), exact=True)
    for got, term in zip(
        reduced.gradients, sum_in_rank_order(chunk, world.size, torch.float32), strict=True
    ):
        same(got, term, exact=True)
    wire.quiesce()
    barrier()


@pytest.mark.parametrize("transport", ["direct", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_moves_in_flight_do_not_mix(ranks, world_size, transport):
    ranks(moves_in_flight_together, transport, world_size=world_size)


def scalars(world: World) -> tuple[float, dict[str, int], bool, bool]:
    wire = Collectives(world)
    total = torch.tensor(float(world.rank + 1), dtype=torch.float64)
    wire.sum_scalar_later(total, "norm").wait()
    everywhere = wire.same_everywhere(2**61), wire.same_everywhere(world.rank)
    return total.item(), wire.take_traffic().bytes_by_kind, *everywhere


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_scalars(ranks, world_size):
    num_bytes = {1: {}, 2: {"norm": 8}, 3: {"norm": 10}}[world_size]  # 2 x 8 bytes x (N-1)/N
    total = sum(range(1, world_size + 1))
    expected = (total, num_bytes, True, world_size == 1)
    assert ranks(scalars, world_size=world_size) == [expected] * world_size


def moves_counted(world: World) -> list[int]:
    """How many moves this rank has counted: before one, once it is under way, and once it was waited for."""
    wire = Collectives(world)
    counts = [_moves()]
    under_way = wire.sum_scalar_later(torch.ones(1), "norm")
    counts.append(_moves())
    under_way.wait()
    return [*counts, _moves()]


def _moves() -> int:
    return progress._numbers[progress.NUM_MOVES]


def test_a_move_counts_when_it_starts_and_when_a_rank_begins_to_wait_for_it(ranks):
    """Whoever looks for a hang tells by it which of two ranks in one phase has done less."""
    for before, under_way, awaited in ranks(moves_counted, world_size=2):
        assert before < under_way < awaited


@pytest.mark.parametrize(
    ("device", "on_gpus", "backend", "transport"),
    [
        ("cpu", "nccl", "gloo", Direct),
        ("cuda:1", "nccl", "nccl", Native),
        ("cuda:1", "gloo", "gloo", Native),  # as torch says of "gloo" alone
    ],
)
def test_a_backend_for_each_device_is_that_of_the_model(
    device, on_gpus, backend, transport, monkeypatch
):
    """What torch says of a group that was made with cpu:gloo,cuda:nccl, or on a GPU without a name."""
    with fake_world(1, 2):
        monkeypatch.setattr(dist, "get_backend_config", lambda: f"cpu:gloo,cuda:{on_gpus}")
        world = current(device)
        monkeypatch.undo()
        assert (world.backend, world.device, world.rank) == (backend, torch.device(device), 1)
        made = (TRANSPORTS[word](world, Moves(world)) for word in ("auto", "messages"))
        assert {type(each) for each in made} == {transport}


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_a_group_takes_one_transport_however_its_backend_was_named(backend, monkeypatch):
    """None is torch's default. Ranks that took different transports would wait for each other for ever."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cpu"))
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = current(nn.Linear(2, 2))
        assert (world.backend, world.device) == ("gloo", torch.device("cpu"))
        assert Collectives(world).traits.name == "direct"
        if backend != "gloo":  # which torch takes for every device
            with pytest.raises(ValueError, match="no backend for cuda:0, only for cpu: give"):
                current("cuda:0")
    finally:
        leave_process_group()


def limits_of_groups(world: World) -> list[object]:
    """What torch is told for a group of ours, and for one of a background thread."""
    patient = replace(world, timeout_seconds=77.0).with_communicator("patience")
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        patient.join()
        behind = worlds.background_group(77.0)
    barrier()  # else a rank may leave while another still connects
    for group in (patient.process_group, behind):
        dist.destroy_process_group(group)
    told = inspect.signature(dist.new_group)
    return [told.bind(*each.args, **each.kwargs).arguments["timeout"] for each in made.mock_calls]


def test_groups_of_ranks_are_as_patient_as_the_run(ranks):
    assert ranks(limits_of_groups) == 2 * [2 * [timedelta(seconds=77)]]
