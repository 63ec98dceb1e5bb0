"""What lies in shared memory is read before it is written again. By what happens first, not by how long it takes.

Ranks are real; where the order of two of them matters they meet at a barrier between.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from zeroexp.comm.base import GatherPart, ReducePart
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.direct import Direct
from zeroexp.comm.point_to_point import ReceivedTensors
from zeroexp.comm.shared_memory import Arena, SharedChannel
from zeroexp.comm.traits import MoveOptions
from zeroexp.cut.chunk import Chunk, Member, ParameterSpec
from zeroexp.cut.layout import lay_out
from zeroexp.process import world as worlds
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World, fake_world

AWHILE_SECONDS = (
    0.5  # who is not held up is done by then; on a slower machine a bug is missed, nothing fails
)


class Slot:
    """A channel to a peer that writes its slot again the moment it hears that it was read."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.events: list[str] = []

    def send(self, tag: int, tensors: Sequence[Tensor], what: str, dtype: Any = None) -> list[Any]:
        self.events.append("send")
        return []

    def receive(
        self, tag: int, like: Sequence[Tensor], what: str, *, into: bool
    ) -> ReceivedTensors:
        slot = [torch.full_like(tensor, self.value) for tensor in like]

        def wait() -> list[Tensor]:
            self.events.append("wait")
            return slot

        def release() -> None:
            self.events.append("release")
            for tensor in slot:
                tensor.fill_(float("nan"))

        return ReceivedTensors(wait, release)


def test_a_slot_is_given_back_after_its_sum_was_taken():
    chunk = Chunk((Member("a", 0, 6),), (0, 2, 4, 6))
    with fake_world(1, 3) as world:
        transport = Direct(world, Moves(world), share_memory=False)
        slots = {0: Slot(10.0), 2: Slot(300.0)}
        transport._channels.update(slots)
        for accumulate, expected in ((False, 311.0), (True, 622.0)):
            out = [torch.full((2,), 311.0)] if accumulate else [torch.empty(2)]
            part = ReducePart(chunk, [torch.ones(6)], out, accumulate)
            transport.reduce_scatter([part], "gradients")[0].wait()
            assert out[0].tolist() == [expected] * 2
    assert all(slot.events == ["send", "wait", "release"] * 2 for slot in slots.values())


def neighbours_of(world: World, slot_bytes: int, num_slots: int) -> dict[int, SharedChannel]:
    """A channel to every rank: all of them call it together."""
    peers = [rank for rank in range(world.size) if rank != world.rank]
    arena = Arena(Moves(world), peers, [], slot_bytes, num_slots)
    shown = worlds.gather_objects(arena.shown)
    channels = {peer: arena.channel_to(peer, shown[peer]) for peer in peers}
    worlds.barrier()
    return channels


def write_three_reductions(world: World) -> list[float]:
    """Rank 0 writes to both others, two slots in all. Rank 1 reads at once, rank 2 keeps the first; what they read."""
    slot_bytes = 2 * 64  # 16 bytes for each of two peers, aligned
    channels = neighbours_of(world, slot_bytes, num_slots=2)
    arrivals: dict[int, ReceivedTensors] = {}
    views: dict[int, Tensor] = {}
    if world.rank == 0:
        for tag in (1, 2):
            for peer in (1, 2):
                channels[peer].send(tag, [torch.full((4,), float(10 * tag + peer))], "gradients")
    else:
        like = [torch.empty(4)]
        arrivals = {
            tag: channels[0].receive(tag, like, "gradients", into=False) for tag in (1, 2, 3)
        }
        views = {tag: arrivals[tag].wait()[0] for tag in (1, 2)}
        if world.rank == 1:
            arrivals[1].release()
        arrivals[2].release()
    worlds.barrier()  # the control blocks say all but that rank 2 has read the first
    if world.rank == 0:
        for peer in (1, 2):
            channels[peer].send(3, [torch.full((4,), float(30 + peer))], "gradients")
    worlds.barrier()
    if world.rank == 0:
        return []
    read = [float(views[1][0]), float(arrivals[3].wait()[0][0])]
    for tag in (1, 3) if world.rank == 2 else (3,):
        arrivals[tag].release()
    return read


def test_a_slot_is_free_when_all_neighbours_have_read_it(ranks):
    _, _, kept = ranks(write_three_reductions, world_size=3)
    assert kept == [12.0, 32.0]


def quiesce_alone(world: World) -> list[str]:
    """Rank 0 is done, and rank 1 not yet: it holds an exposure that it has not read."""
    wire = Collectives(world, MoveOptions(transport="direct"))
    wire.connect()
    wire.reserve([64], 64)
    (chunk,) = lay_out("buffer", [[ParameterSpec("a", 8, 4)]], world.size)[0]
    piece = wire.empty(4, torch.float32).fill_(1.0 + world.rank)
    part = GatherPart(chunk, torch.empty(8), piece)
    pending = wire.all_gather([part], "gather")
    if world.rank == 1:
        worlds.barrier()
        pending.wait()
        wire.quiesce()
        return [str(part.full.tolist()[0])]
    pending.wait()
    events = ["still waits"]

    def overwrite() -> None:
        wire.quiesce()
        events.append("quiet")
        piece.fill_(77.0)

    ending = Thread(target=overwrite)
    ending.start()
    ending.join(AWHILE_SECONDS)
    heard = list(events)
    worlds.barrier()  # from here on rank 1 reads
    ending.join()
    return [*heard, events[-1]]


def test_quiesce_waits_for_who_has_not_read(ranks):
    """Whoever reads late finds what was exposed, and only then is it overwritten."""
    assert ranks(quiesce_alone) == [["still waits", "quiet"], ["1.0"]]
