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
from zeroexp.zero.engine import Engine
from zeroexp.zero.observer import Observer
from zeroexp.zero.unit import Unit
from zeroexp.zero_safety.changed_parameters import is_compared


class Replicas(Observer):
    """Replicas that are equal after each step, or after each outer one."""

    _num_equal = 0  # steps that have left all replicas the same weights

    def built(self, engine: Engine) -> None:
        self._units, self._wire = engine.units, engine.wire
        self._are_compared = engine.wire.holders.size > 1 and not engine.wire.world.is_fake

    def weights_changed(self, *, stepped: bool = False, are_equal: bool = True) -> None:
        if stepped and are_equal:
            self._num_equal += 1
            if self._are_compared and is_compared(self._num_equal):
                _refuse_different(self._units, self._wire)


def _refuse_different(units: Sequence[Unit], wire: Collectives) -> None:
    """Raise RuntimeError on all ranks if ranks that hold the same pieces hold different weights."""
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
