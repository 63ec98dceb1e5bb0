"""A secondary copy of the parameters inside each node, so that one gather of a step leaves it (ZeRO++: hpZ).

    4 ranks, nodes of 2     rank 0   rank 1  |  rank 2   rank 3
    piece                   a        b       |  c        d          what the optimizer updates, 1/4 of the parameters
    secondary copy          a b      c d     |  a b      c d        what was gathered last, 1/2 of them

The first gather of a unit after its weights have changed goes over all ranks that shard, and each rank keeps a part of
what it brings. Until they change again, gathers carry the kept parts, between the ranks of a node alone: that of
backward, and those of later microbatches. What is kept are the bytes that travelled, codes where a codec makes them; so
each gather shows the same weights bit for bit, with a copy or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zeroexp.comm.base import GatherPart, Transport
from zeroexp.cut.chunk import Chunk
from zeroexp.process.world import World


@dataclass
class SecondaryCopy:
    """What this rank keeps of one unit for its node."""

    chunks: tuple[Chunk, ...]  # what travels of the unit, cut for the ranks of a node
    kept: list[Tensor]  # this rank's section of each
    place: int  # of this rank in its node
    exposure: int  # by which the transport of the node knows them
    # Whether the weights are still those that were kept. All ranks gather a unit, and change its weights, in one order.
    is_current: bool = False

    def keep(self, fulls: Sequence[Tensor]) -> None:
        """Keep this rank's sections of what a gather over all ranks has brought; their padding stays zero."""
        for chunk, kept, full in zip(self.chunks, self.kept, fulls, strict=True):
            real = full[chunk.real_section(self.place)]
            kept[: len(real)].copy_(real)
        self.is_current = True

    def parts(self, fulls: Sequence[Tensor]) -> list[GatherPart]:
        """Return what the ranks of a node gather into these tensors."""
        return list(map(GatherPart, self.chunks, fulls, self.kept))


class Node:
    """The ranks among which secondary copies are gathered: neighbours, of which each node has so many."""

    def __init__(self, world: World, transport: Transport):
        self.world, self.transport = world, transport

    def copy_of(self, parts: Sequence[GatherPart]) -> SecondaryCopy:
        """Make room for what this rank keeps of these parts. All ranks call it in one order."""
        size, place = self.world.size, self.world.rank
        chunks = tuple(part.chunk.for_ranks(size) for part in parts)
        kept = [
            p.full.new_zeros(c.section_numel(place)) for c, p in zip(chunks, parts, strict=True)
        ]
        return SecondaryCopy(chunks, kept, place, self.transport.expose((), None))
