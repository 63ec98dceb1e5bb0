"""Numbers, tags, slots and messages of the transports hold for any number of steps.

Each count runs over here, begins again, and is looked at from both sides. No engine takes part.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.comm import direct
from zeroexp.comm.base import GatherPart, ReducePart, WatchedWork
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.control_block import MOST_EXPOSURES, OwnControlBlock
from zeroexp.comm.direct import GATHERS_APART, MOST_ENGINES, NUM_TAGS, Direct
from zeroexp.comm.point_to_point import ReceivedTensors
from zeroexp.comm.traits import MoveOptions
from zeroexp.cut.chunk import Chunk, Member, ParameterSpec
from zeroexp.cut.layout import lay_out
from zeroexp.process.watchdog import differs
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World, fake_world

LARGEST_C_INT = 2**31 - 1


# -- tags of messages -------------------------------------------------------------------------------


class Tagged:
    """A channel to a peer that does not exist: it remembers the tags of what is sent there."""

    def __init__(self) -> None:
        self.tags: list[int] = []

    def send(self, tag: int, tensors: Sequence[Tensor], what: str, dtype: Any = None) -> list[Any]:
        self.tags.append(tag)
        return []

    def receive(
        self, tag: int, like: Sequence[Tensor], what: str, *, into: bool
    ) -> ReceivedTensors:
        return ReceivedTensors(lambda: [torch.zeros_like(tensor) for tensor in like], lambda: None)

    def take(self) -> list[int]:
        taken, self.tags = self.tags, []
        return taken


def transport_to(peer: Tagged, world: World) -> Direct:
    transport = Direct(world, Moves(world), share_memory=False)
    transport._channels[1] = peer
    return transport


def a_part() -> GatherPart:
    return GatherPart(Chunk((Member("a", 0, 4),), (0, 2, 4)), torch.zeros(4), torch.zeros(2))


def reduce(transport: Direct) -> None:
    part = ReducePart(Chunk((Member("a", 0, 4),), (0, 2, 4)), [torch.zeros(4)], [torch.zeros(2)])
    transport.reduce_scatter([part], "gradients")[0].wait()


def test_gathers_in_flight_have_tags_of_their_own() -> None:
    """39 units, each gathered as often as may be in flight, and as many reductions between: no two tags are equal."""
    num_units, peer = 39, Tagged()
    with fake_world(0, 2) as world:
        transport = transport_to(peer, world)
        exposures = [transport.expose([a_part()], None) for _ in range(num_units)]
        rounds: list[list[int]] = []
        for _ in range(2 * GATHERS_APART):
            for exposure in exposures:
                transport.all_gather([a_part()], exposure, "parameters")
                reduce(transport)
            rounds.append(peer.take())
    apart = {tag for tags in rounds[:GATHERS_APART] for tag in tags}
    assert len(apart) == 2 * num_units * GATHERS_APART
    gathers = [tags[::2] for tags in rounds]
    assert gathers[GATHERS_APART:] == gathers[:GATHERS_APART], "and then they begin again"


def test_tags_of_reductions_begin_again_in_the_range_of_their_engine(monkeypatch) -> None:
    monkeypatch.setattr(direct, "NUM_TAGS", 64)
    peer = Tagged()
    with fake_world(0, 2) as world:
        transport = transport_to(peer, world)
        for _ in range(100):
            reduce(transport)
    first = min(peer.tags) // 64 * 64
    assert all(first <= tag < first + 64 for tag in peer.tags)
    assert len(set(peer.tags)) == 32, "the other half is for gathers"
    assert peer.tags[32:64] == peer.tags[:32]


def test_engines_share_no_tag_until_their_ranges_begin_again() -> None:
    """The largest tag fits a C int, with the most exposures that a control block holds."""
    peer = Tagged()
    with fake_world(0, 2) as world:
        for _ in range(MOST_ENGINES + 1):  # as many as a long session of a notebook makes
            transport = transport_to(peer, world)
            transport.all_gather([a_part()], MOST_EXPOSURES - 1, "parameters")
    *before, again = peer.tags
    assert again == before[0]
    apart = sorted(before)
    assert all(b - a == NUM_TAGS for a, b in itertools.pairwise(apart))
    assert (apart[-1] // NUM_TAGS + 1) * NUM_TAGS - 1 == LARGEST_C_INT


# -- exposures in shared memory ------------------------------------------------------------------------


def test_an_exposure_tells_its_places_in_its_step_alone() -> None:
    control = OwnControlBlock(2)
    for step in (1, 2, 3):
        control.post_exposed(7, step, [64, 128])
        control.post_exposed(8, step, [192])
        assert list(control.exposed_offsets(7, step) or []) == [64, 128]
        assert list(control.exposed_offsets(8, step) or []) == [192]
        assert control.exposed_offsets(7, step - 1) is None
        assert control.exposed_offsets(7, step + 1) is None


# -- more moves than a rank remembers ---------------------------------------------------------------


HERE = World(0, 2, torch.device("cpu"), "gloo")
LOOKS = 0.05  # seconds of a look and of patience here
REMEMBERED = 8  # moves


def wait_by_turns(world: World) -> list[float]:
    """Each rank in turn waits long for the other, with more gathers between than a rank remembers.

    What the two remember then has other lengths, and begins at other moves.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOOK_SECONDS", "PATIENCE_SECONDS"):
            patch.setattr(differs, name, LOOKS)
        patch.setattr(differs, "NUM_REMEMBERED", REMEMBERED)
        wire = Collectives(world, MoveOptions(transport="gloo"))
        wire.connect()
        (chunk,) = lay_out("buffer", [[ParameterSpec("a", 8, 4)]], world.size)[0]
        read: list[float] = []

        def gather(number: int) -> None:
            part = GatherPart(chunk, torch.empty(8), torch.full((4,), float(number)))
            wire.all_gather([part], "gather", what=f"unit {number}").wait()
            read.append(float(part.full[4 * (1 - world.rank)]))

        for slow in (0, 1):
            if world.rank == slow:
                time.sleep(12 * LOOKS)  # ranks are compared while the other one waits
            for number in range(REMEMBERED + 1):
                gather(number)
            wire.quiesce()
        return read


def test_of_a_slow_rank_what_both_remember_is_compared(ranks) -> None:
    expected = [float(number) for _ in range(2) for number in range(REMEMBERED + 1)]
    assert ranks(wait_by_turns) == [expected] * 2


# -- waits for collectives --------------------------------------------------------------------------


def groups_of_two(store: dist.Store) -> list[Any]:
    """Two ranks of gloo in two threads of this process."""
    groups: dict[int, Any] = {}

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[rank] for rank in range(2)]


class WaitedFor:
    """A work that is waited for at most so often."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.times = 0

    def wait(self) -> None:
        self.times += 1
        assert self.times == 1, "a collective that failed is waited for again"
        self._work.wait()


def test_a_collective_that_failed_is_waited_for_once(monkeypatch) -> None:
    """The peer has left: gloo says so at once, and no rank is found to differ."""
    monkeypatch.setattr(differs, "LOOK_SECONDS", 0.0)  # nobody looks
    monkeypatch.setattr(differs, "PATIENCE_SECONDS", 0.0)
    groups = groups_of_two(dist.HashStore())
    work = groups[0].allreduce([torch.ones(4)])
    groups.pop().abort()
    failed = WaitedFor(work)
    moves = Moves(HERE)
    moves.record_collective("the norm")
    with pytest.raises(RuntimeError):
        WatchedWork(failed, moves).wait()
    assert failed.times == 1


def test_a_collective_that_is_only_slow_is_waited_for_until_it_ends(monkeypatch) -> None:
    monkeypatch.setattr(differs, "LOOK_SECONDS", LOOKS)
    groups = groups_of_two(dist.HashStore())
    mine, theirs = torch.ones(4), torch.ones(4)
    work = groups[0].allreduce([mine])
    late = threading.Timer(8 * LOOKS, lambda: groups[1].allreduce([theirs]).wait())
    late.start()
    WatchedWork(work, Moves(HERE)).wait()
    late.join()
    assert mine.tolist() == theirs.tolist() == [2.0] * 4
