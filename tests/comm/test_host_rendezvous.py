"""How ranks of one host meet: strangers do not disturb, nothing is left behind, and whatever waits has a limit."""

from __future__ import annotations

import gc
import os
import socket
import threading
from contextlib import closing

import pytest
import torch
from torch import nn

from tests.descriptors import mappings_of_ours, open_now
from zeroexp.comm import host_rendezvous
from zeroexp.comm.base import GatherPart
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.host_rendezvous import TOKEN_BYTES, Listener, connect
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process.world import World, barrier
from zeroexp.zero.options import Options


def call(address: str, words: bytes) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(address)
    if words:
        stranger.send(words)
    return stranger


def hello(token: bytes, rank: int) -> bytes:
    return host_rendezvous._HELLO.pack(token, rank)


def meet(listeners: list[Listener], rank: int, found: dict, seconds: float = 10.0) -> None:
    doors = [listener.door for listener in listeners]
    peers = [peer for peer in range(len(doors)) if peer != rank]
    found[rank] = connect(rank, peers, doors, listeners[rank], seconds)


def test_strangers_are_put_down_and_hold_up_nobody():
    """Silent ones, a wrong token, half a word, a rank out of range, and a rank that is there already."""
    listeners = [Listener() for _ in range(3)]
    address, token = listeners[0].door
    strangers = [
        call(address, b""),
        call(address, hello(b"x" * TOKEN_BYTES, 1)),
        call(address, token[:5]),
        call(address, hello(token, 7)),
        call(address, hello(token, 0)),
        call(address, hello(token, -1)),
    ]
    found: dict[int, dict[int, socket.socket]] = {}
    threads = [threading.Thread(target=meet, args=(listeners, r, found)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {rank: set(sockets) for rank, sockets in found.items()} == {
        0: {1, 2},
        1: {0, 2},
        2: {0, 1},
    }
    for rank, sockets in found.items():
        for peer, line in sockets.items():
            line.send(bytes([rank]))
            assert found[peer][rank].recv(1) == bytes([rank]), (rank, peer)
    for stranger in strangers:
        stranger.settimeout(5)
        assert stranger.recv(1) == b"", "a stranger was not put down"
    for line in [*strangers, *(s for sockets in found.values() for s in sockets.values())]:
        line.close()
    for listener in listeners:
        listener.close()


NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may act as another user")
def test_another_user_gets_no_memory_even_with_the_token():
    """It calls first, and knows all that a rank knows: its connection is closed before anything is shown."""
    listeners = [Listener() for _ in range(2)]
    address, token = listeners[0].door
    told, tells = os.pipe()
    other = os.fork()
    if other == 0:
        os.setuid(NOBODY)
        caller = call(address, hello(token, 1))
        os.write(tells, b".")
        caller.settimeout(60)
        try:
            _, files, _, _ = socket.recv_fds(caller, 100, 3)
        except ConnectionResetError:
            files = []
        os._exit(len(files))
    assert os.read(told, 1) == b"."
    found: dict[int, dict[int, socket.socket]] = {}
    threads = [threading.Thread(target=meet, args=(listeners, r, found)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory = os.memfd_create("memory")
    for rank, line in ((0, found[0][1]), (1, found[1][0])):
        assert host_rendezvous._user_of(line) == os.geteuid(), rank
    socket.send_fds(found[0][1], [b"."], [memory])
    _, files, _, _ = socket.recv_fds(found[1][0], 1, 1)
    assert len(files) == 1, "the rank gets what the other user did not"
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
    for each in (told, tells, memory, *files):
        os.close(each)
    for line in (*found[0].values(), *found[1].values(), *(each.socket for each in listeners)):
        line.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may act as another user")
def test_no_token_is_said_to_another_user():
    """One who listens at the address of a rank that has gone."""
    with closing(Listener()) as listener:
        door = listener.door
    told, tells = os.pipe()
    other = os.fork()
    if other == 0:
        os.setuid(NOBODY)
        false = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        false.bind(door[0])
        false.listen()
        os.write(tells, b".")
        heard = false.accept()[0].recv(100)
        os._exit(len(heard))
    assert os.read(told, 1) == b"."
    with closing(Listener()) as mine, pytest.raises(ConnectionError, match="is another user"):
        connect(1, [0], [door, mine.door], mine, 60)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
    os.close(told)
    os.close(tells)


def test_a_rank_that_does_not_call_is_named_and_nothing_stays_open():
    listeners = [Listener() for _ in range(3)]
    before = open_now()
    found: dict = {}
    with pytest.raises(
        TimeoutError, match=r"rank 1 waited in vain for rank 2 of this host to call"
    ):
        meet(listeners, 1, found, seconds=0.2)
    assert not open_now() - before
    for listener in listeners:
        listener.close()


# -- in real ranks -----------------------------------------------------------------------------------


def gather_unheard(world: World) -> str:
    """Rank 0 waits for an offer that rank 1 never makes."""
    wire = Collectives(world)
    wire.connect()
    wire.reserve([1 << 16], 1 << 16)
    wire._transport._arena.bell._timeout_seconds = 0.5
    said = ""
    if world.rank == 0:
        from zeroexp.cut.chunk import ParameterSpec
        from zeroexp.cut.layout import lay_out

        (chunk,) = lay_out("buffer", [[ParameterSpec("w", 10, 4)]], world.size)[0]
        full = wire.empty(chunk.padded_numel, torch.float32)
        part = GatherPart(chunk, full, full[chunk.section(0)])
        with pytest.raises(TimeoutError) as caught:
            wire.all_gather([part], "gather", what="unit blocks.3").wait()
        said = str(caught.value)
    barrier()
    return said


def test_who_waits_says_for_whom_and_for_what_and_has_the_limit_of_the_world(ranks):
    said, _ = ranks(gather_unheard)
    assert said == "rank 0 waited 0.5 s for rank 1: the gather of unit blocks.3"


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
        wire = Collectives(world, transport="direct")
        try:
            wire.connect()
            wire.reserve([1 << 16], 1 << 16)
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
    """(offers on the board after one forward, after many)"""
    strategy = small_engine(world, 0)
    board = strategy.wire._transport._arena.board
    counts = []
    for num_forwards in (1, 30):
        for _ in range(num_forwards):
            with torch.no_grad():
                strategy.model(torch.ones(2, 5))
        counts.append((len(board._offsets_of), board._top))
    barrier()
    return counts[0], counts[1]


def test_evaluation_before_the_first_step_keeps_no_offers(ranks):
    for first, later in ranks(forwards_before_the_first_step):
        assert first == later and first[0] <= 4  # units, the root among them


def two_engines(world: World, transport: str) -> list[float]:
    """Their gradients travel at once; rank 1 waits for the second one's first."""
    from zeroexp.comm.base import ReducePart
    from zeroexp.cut.chunk import ParameterSpec
    from zeroexp.cut.layout import lay_out

    (chunk,) = lay_out("buffer", [[ParameterSpec("w", 10, 4)]], world.size)[0]
    wires = [Collectives(world, transport=transport) for _ in range(2)]
    for wire in wires:
        wire.connect()
        wire.reserve([1 << 16], 1 << 16)
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
