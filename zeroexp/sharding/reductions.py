"""Gradients are reduced bucket by bucket, in an order that all ranks agree on.

    backward            block 2        block 1        block 0
    compute             ######         ######         ######
    reduce                  2a 2b ...      1a 1b ...      0a ...      then the root's

[Note: one order] Ranks must issue the same reductions in the same order, whichever gradients exist. A bucket whose
gradients are there early waits for its turn; the schedule completes a unit whose parameters get no gradient when
backward has passed it, or at the latest at the end of the microbatch.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from zeroexp.comm.base import Pending
from zeroexp.comm.collectives import Collectives
from zeroexp.cut.bucket import Bucket
from zeroexp.sharding.unit import Unit


@dataclass
class Progress:
    """This record tells how far the gradients of one unit have come in this microbatch."""

    missing: list[int] = field(default_factory=list[int])  # parameters without gradient, by bucket
    num_launched: int = 0  # buckets that were launched
    complete: bool = False  # no further gradient comes


class Reductions:
    """This object starts the reductions of one engine, in one order."""

    def __init__(
        self, units: Sequence[Unit], wire: Collectives, *, overlap: bool, reduce_each: str
    ):
        self._wire = wire
        self._overlap = overlap
        self._reduce_each = reduce_each
        self._most_in_flight = wire.facts.reductions_in_flight if overlap else 0
        trainable = [unit for unit in units if unit.trainable]
        self._order = [*reversed(trainable[1:]), *trainable[:1]]
        self._num_in = {u: [len(u.parameters_in(bucket)) for bucket in u.buckets] for u in units}
        self._buckets_of = {unit: _buckets_by_parameter(unit) for unit in units}
        self._progress = {unit: Progress() for unit in units}
        self._in_flight: deque[Pending] = deque()
        self._completed: list[Unit] = []  # units completed in this microbatch, in order
        self._turn = 0  # index in the order of the unit whose buckets may be launched
        self._last = True  # whether this microbatch is the last of its step
        self._launched = False  # whether any reduction of this microbatch was launched

    def begin_microbatch(self, *, last: bool) -> None:
        self._last = last
        self._turn = 0
        self._launched = False
        self._completed = []
        for unit, counts in self._num_in.items():
            self._progress[unit] = Progress(missing=counts.copy())

    def gradient_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Count the gradient and launch the buckets that are complete and whose turn it is."""
        progress = self._progress[unit]
        for bucket in self._buckets_of[unit][parameter]:
            progress.missing[bucket] -= 1
        self._launch()

    def complete(self, unit: Unit) -> None:
        """Expect no further gradient of this unit in this microbatch; missing ones count as zeros."""
        progress = self._progress[unit]
        if not progress.complete:
            progress.complete = True
            self._completed.append(unit)
            self._launch()

    def is_complete(self, unit: Unit) -> bool:
        return self._progress[unit].complete

    def end_microbatch(self) -> None:
        if self._last or not self._overlap:
            self.finish()

    def abandon_microbatch(self) -> bool:
        """Forget the microbatch; return whether reductions are lost, because it had launched some of its own.

        Reductions of earlier microbatches are finished: the other ranks have launched them too, or are about to, and
        wait for this rank to take its part.
        """
        lost = self._launched
        try:
            if not lost:
                self.finish()
        except Exception:
            # A peer is gone; the exception that ended the microbatch is the one to raise.
            lost = True
        finally:
            self._in_flight.clear()
            self._progress = {unit: Progress() for unit in self._progress}
        return lost

    def finish(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().wait()
        self._wire.finish_sums()

    def agree(self, gathered: Sequence[Unit]) -> bool:
        """After the first microbatch adopt the order in which gradients came, if it was the same on all ranks.

        gathered: the units that this rank gathered, in order. Returns whether gathers and gradients came in the same
        order on all ranks. Any such order will do: ranks whose gradients differ later launch at the same places, since
        no gradient decides where a unit is closed where every rank takes part in a gather.
        """
        came = [unit for unit in self._completed if unit.trainable]
        names = "\n".join(unit.name for unit in (*came, *gathered))
        if not self._wire.same_everywhere(zlib.crc32(names.encode())):
            return False
        self._order = came
        return True

    def _launch(self) -> None:
        """Launch every bucket that has its gradients and whose predecessors were launched, see [Note: one order]."""
        while self._turn < len(self._order):
            unit = self._order[self._turn]
            progress = self._progress[unit]
            for bucket in range(progress.num_launched, len(unit.buckets)):
                if progress.missing[bucket] and not progress.complete:
                    return
                progress.num_launched += 1
                self._reduce(unit, unit.buckets[bucket])
            if not progress.complete:
                return
            self._turn += 1

    def _reduce(self, unit: Unit, bucket: Bucket) -> None:
        if not self._last and self._reduce_each == "step":
            return
        reduce = unit.reduce_to_owner if unit.reduces_at_hand_over else unit.reduce
        pending = reduce(bucket, last=self._last)
        if pending is None:
            return
        self._launched = True
        self._in_flight.append(pending)
        while len(self._in_flight) > self._most_in_flight:
            self._in_flight.popleft().wait()


def _buckets_by_parameter(unit: Unit) -> dict[nn.Parameter, list[int]]:
    found: dict[nn.Parameter, list[int]] = {}
    for index, bucket in enumerate(unit.buckets):
        for parameter in unit.parameters_in(bucket):
            found.setdefault(parameter, []).append(index)
    return found
