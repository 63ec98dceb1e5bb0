"""Ranks of one host share memory: with nobody else, nothing is left behind, and whatever waits has a limit."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.descriptors import mappings_of_ours, open_now
from zeroexp.comm import shared_memory
from zeroexp.comm.base import GatherPart, ReducePart
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.shared_memory import Arena
from zeroexp.comm.traits import MoveOptions
from zeroexp.cut.chunk import Chunk, ParameterSpec
from zeroexp.cut.layout import lay_out
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World, barrier
from zeroexp.zero.options import Options

NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may act as another user")
def test_another_user_gets_no_memory_although_it_knows_all_that_a_rank_knows():
    worlds = [World(rank, 2, torch.device("cpu"), "fake") for rank in range(2)]
    first, second = (Arena(Moves(w), [1 - w.rank], [64], 64, num_slots=2) for w in worlds)
    shown = first.shown
    reads, writes = os.pipe()
    other = os.fork()
    if other == 0:
        os.setuid(NOBODY)
        try:
            second.channel_to(0, shown)
        except ConnectionError as error:
            os.write(writes, str(error).encode())
        os._exit(0)
    os.waitpid(other, 0)
    os.write(writes, b".")
    expected = "rank 1 can not open the memory of rank 0 (Permission denied)."
    assert os.read(reads, 1000).decode() == expected
    second.channel_to(0, shown)
    for each in (reads, writes):
        os.close(each)


def one_chunk(world: World) -> Chunk:
    ((chunk,),) = lay_out("buffer", [[ParameterSpec("w", 10, 4)]], world.size)
    return chunk


def connected(world: World, transport: str = "direct") -> Collectives:
    wire = Collectives(world, MoveOptions(transport=transport))
    wire.connect()
    wire.reserve([1 << 16], 1 << 16)
    return wire


CAPABILITIES = struct.Struct(
    "6I"
)  # effective, permitted and inheritable ones: the lower 32, then the upper
CAP_SYS_PTRACE = 1 << 19
PR_SET_DUMPABLE = 4


def let_rank_1_look_into_rank_0(world: World, may: bool) -> None:
    """Root's rank 1 uses its right to look into others, or not; of another user rank 0 shows itself, or not."""
    libc = ctypes.CDLL(None)
    if os.geteuid() != 0:
        assert libc.prctl(PR_SET_DUMPABLE, int(may or world.rank != 0), 0, 0, 0) == 0
    elif world.rank == 1:
        head, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
        assert libc.capget(head, data) == 0
        lower, *others = CAPABILITIES.unpack(data.raw[:24])
        lower = lower | CAP_SYS_PTRACE if may else lower & ~CAP_SYS_PTRACE
        assert libc.capset(head, CAPABILITIES.pack(lower, *others)) == 0


def sum_where_the_kernel_refuses(world: World, may: bool) -> tuple[str, float, list[str]]:
    """(transport, a sum that it makes, warnings)"""
    let_rank_1_look_into_rank_0(world, may)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            wire = connected(world)
    finally:
        let_rank_1_look_into_rank_0(world, True)
    chunk = one_chunk(world)
    out = [torch.zeros(span.numel) for span in chunk.spans(world.rank)]
    wire.reduce_scatter([ReducePart(chunk, [torch.ones(10)], out)], "reduce").wait()
    wire.quiesce()
    barrier()
    return wire.traits.name, out[0][0].item(), [str(each.message) for each in warned]


def test_ranks_of_a_host_that_refuses_one_of_them_all_send_messages_and_one_says_so(ranks):
    """Rank 0 can open the memory of rank 1, and not the other way: both must decide alike."""
    warned = (
        "ranks [0, 1] of one host can not open each other's memory (Permission denied), so what they exchange is sent "
        "as messages, which takes longer"
    )
    assert ranks(sum_where_the_kernel_refuses, False) == [
        ("gloo", 2.0, [warned]),
        ("gloo", 2.0, []),
    ]
    assert ranks(sum_where_the_kernel_refuses, True) == [("direct", 2.0, [])] * 2


def test_a_probe_of_another_process_is_not_taken_for_the_one_shown():
    with shared_memory.shown_probe() as shown, shared_memory.shown_probe() as other:
        assert (shown.problem(), other.problem()) == ("", "")
        assert shown._replace(path=other.path).problem() == f"{other.path} is another file"
    assert shown.problem() == "No such file or directory"


def gather_unheard(world: World) -> list[str]:
    """Rank 0 waits for an exposure that rank 1 never makes, and once more when rank 1 has let go of its memory."""
    wire = connected(replace(world, timeout_seconds=0.5))
    errors: list[str] = []
    if world.rank == 0:
        chunk = one_chunk(world)
        full = wire.empty(chunk.padded_numel, torch.float32)
        part = GatherPart(chunk, full, full[chunk.section(0)])
        for error in (TimeoutError, ConnectionError):
            with pytest.raises(error) as caught:
                wire.all_gather([part], "gather", what="unit blocks.3").wait()
            errors.append(str(caught.value))
            barrier()
            barrier()  # rank 1 has let go
    else:
        barrier()
        del wire
        gc.collect()
        for _ in range(3):
            barrier()
    return errors


def test_who_waits_says_for_whom_and_for_what_and_has_the_limit_of_the_world(ranks):
    (out_of_time, left), _ = ranks(gather_unheard)
    assert out_of_time == "rank 0 waited 0.5 s for rank 1: the gather of unit blocks.3"
    assert left == "rank 1 has left while rank 0 waited for the gather of unit blocks.3"


def small_engine(world: World, seed: int) -> Sharded:
    torch.manual_seed(seed)
    module = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    return Sharded(
        module,
        blocks=["0", "1", "2"],
        stage=STAGES["zero3"],
        param_groups=[{"params": list(module.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.1),
        world=world,
        options=Options(transport="direct"),
    )


def fail_in_the_middle(world: World) -> tuple[set[tuple[str, str]], int]:
    """(descriptors, mappings of shared memory) that three failures add to those of a first."""

    def one() -> None:
        try:
            wire = connected(world)  # noqa: F841
            raise ValueError("in the middle")
        except ValueError:
            barrier()

    one()
    gc.collect()
    before, mapped = open_now(), mappings_of_ours()
    for _ in range(3):
        one()
    gc.collect()
    return open_now() - before, mappings_of_ours() - mapped


def test_after_an_exception_nothing_is_left_behind(ranks):
    assert ranks(fail_in_the_middle) == [(set(), 0)] * 2


def forwards_before_the_first_step(world: World) -> tuple[int, int]:
    """(exposures on the control block after one forward, after many)"""
    strategy = small_engine(world, 0)
    control = strategy.wire._transport._arena.control
    counts = []
    for num_forwards in (1, 30):
        for _ in range(num_forwards):
            with torch.no_grad():
                strategy.model(torch.ones(2, 5))
        counts.append((len(control._have_entries), control._top))
    barrier()
    return counts[0], counts[1]


def test_evaluation_before_the_first_step_keeps_no_offers(ranks):
    for first, later in ranks(forwards_before_the_first_step):
        assert first == later and first[0] <= 4  # units, the root among them


def two_engines(world: World, transport: str) -> list[float]:
    """Their gradients travel at once; rank 1 waits for the second one's first."""
    chunk = one_chunk(world)
    wires = [connected(world, transport) for _ in range(2)]
    order = (0, 1) if world.rank == 0 else (1, 0)
    parts, pendings = {}, {}
    for index in order:
        gradients = [torch.full((10,), 10.0**index)]
        spans = chunk.spans(world.rank)
        out = [torch.zeros(span.numel) for span in spans]
        parts[index] = ReducePart(chunk, gradients, out)
        pendings[index] = wires[index].reduce_scatter([parts[index]], "reduce")
    for index in order:
        pendings[index].wait()
    for wire in wires:
        wire.quiesce()
    barrier()
    return [parts[index].out[0][0].item() for index in (0, 1)]


@pytest.mark.parametrize("transport", ["direct", "gloo"])
def test_two_engines_do_not_take_each_others_messages(ranks, transport):
    assert ranks(two_engines, transport) == [[2.0, 20.0]] * 2
