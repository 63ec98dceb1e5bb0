"""Replicas hold the same weights: where a sum between them is missing they drift apart, and a step says so.

Nothing else would: each replica trains on its own samples, and its loss falls. The weights are compared bit for bit
after the first two steps and every hundredth (changed_parameters.py), by a sum over their bits; of seldom synchronised
replicas (zero/outer.py) those steps count that end with an outer one. Ranks start alike (zero/assemble.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.comm.collectives import Collectives
from zeroexp.process import world as worlds
from zeroexp.zero.assemble import bit_checksum
from zeroexp.zero.unit import Unit


def refuse_different_replicas(units: Sequence[Unit], wire: Collectives) -> None:
    """Raise RuntimeError on all ranks if ranks that hold the same pieces hold different weights."""
    if wire.holders.size == 1 or wire.world.is_fake:
        return
    # Of masters that each updates a share of no two ranks have the same.
    sums = [sum(bit_checksum(held.piece) for held in unit.trainable) for unit in units]
    of_ranks = worlds.gather_objects(sums)
    for rank, theirs in enumerate(of_ranks):
        first = rank % wire.group.size  # the rank of its place in the first group
        differing = [
            u for u, *pair in zip(units, of_ranks[first], theirs, strict=True) if pair[0] != pair[1]
        ]
        if differing:
            raise RuntimeError(
                f"replicas differ: ranks {first} and {rank} hold other weights of {differing[0]} after a step "
                f"({len(differing)} of {len(units)} units): a sum between replicas is missing, or one of the ranks "
                "computes otherwise"
            )
