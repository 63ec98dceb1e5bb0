"""Replicas hold the same weights, and ranks step with the same options; where they do not, a step says so.

Nothing else would: each replica trains on its own samples, and its loss falls. Both are compared after the first two
steps and every hundredth (changed_parameters.py). Weights drift apart where a sum between replicas is missing: they are
compared bit for bit, by a sum over their bits; of seldom synchronised replicas (zero/outer.py) those steps count that
end with an outer one. Learning rates differ where a scheduler looks at a rank's own loss. Ranks start alike
(zero/assemble.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroexp.comm.collectives import Collectives
from zeroexp.process import world as worlds
from zeroexp.zero.assemble import bit_checksum, comparable
from zeroexp.zero.engine import Engine
from zeroexp.zero.observer import Observer
from zeroexp.zero.unit import Unit
from zeroexp.zero_safety.changed_parameters import is_compared


class Replicas(Observer):
    """Replicas that are equal after each step, or after each outer one, and what the optimizers of all ranks do."""

    _num_steps = 0
    _num_equal = 0  # steps that have left all replicas the same weights

    def built(self, engine: Engine) -> None:
        self._units, self._wire, self._optimizer = engine.units, engine.wire, engine.optimizer
        self._are_compared = engine.wire.holders.size > 1 and not engine.wire.world.is_fake

    def weights_changed(self, *, stepped: bool = False, are_equal: bool = True) -> None:
        self._num_steps += stepped
        if stepped and is_compared(self._num_steps):
            _refuse_other_options(self._optimizer, self._wire)
        if stepped and are_equal:
            self._num_equal += 1
            if self._are_compared and is_compared(self._num_equal):
                _refuse_different(self._units, self._wire)


def _refuse_other_options(optimizer: torch.optim.Optimizer, wire: Collectives) -> None:
    """Raise RuntimeError on all ranks if parameter groups have other options on one of them."""
    options = {
        f"{name} of parameter group {index}": repr(comparable(group.get(name)))
        for index, group in enumerate(optimizer.param_groups)
        for name in optimizer.defaults
    }
    if wire.same_everywhere(options, "a comparison of learning rates"):
        return
    first, *others = worlds.gather_objects(options)
    for rank, theirs in enumerate(others, start=1):
        for key, here in first.items():
            if (there := theirs.get(key)) != here:
                raise RuntimeError(
                    f"ranks differ: {key} is {here} on rank 0 and {there} on rank {rank}: let a scheduler see the "
                    "loss of all ranks, not a rank's own"
                )


def _refuse_different(units: Sequence[Unit], wire: Collectives) -> None:
    """Raise RuntimeError on all ranks if ranks that hold the same pieces hold different weights."""
    # Of masters that each updates a share of no two ranks have the same.
    sums = [sum(bit_checksum(held.piece) for held in unit.trainable) for unit in units]
    of_ranks = worlds.gather_objects(sums)
    for rank, theirs in enumerate(of_ranks):
        first = wire.grid.holders(rank)[0]
        differing = [
            u for u, *pair in zip(units, of_ranks[first], theirs, strict=True) if pair[0] != pair[1]
        ]
        if differing:
            raise RuntimeError(
                f"replicas differ: ranks {first} and {rank} hold other weights of {differing[0]} after a step "
                f"({len(differing)} of {len(units)} units): a sum between replicas is missing, or one of the ranks "
                "computes otherwise"
            )
