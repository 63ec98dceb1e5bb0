"""Prefetching gathers units before they are needed, in the order in which the first microbatch gathered them.

    compute         block 0        block 1        block 2
    all-gather        gather 1 ....  gather 2 ....  gather 3 ...

A wrong guess costs a gather and never a wrong result: the unit is freed when another needs its memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zeroexp.comm.base import Pending
from zeroexp.sharding.gathers import Eviction, Gathers
from zeroexp.sharding.state import Residence
from zeroexp.sharding.unit import Unit


class Prefetch(Gathers):
    """This object gathers units ahead and leaves what moves in flight until it is used."""

    def __init__(self, units: Sequence[Unit], *, keep: str, eviction: Eviction, depth: int):
        super().__init__(units, keep=keep, eviction=eviction)
        self.depth = depth
        self._arriving: dict[Unit, Pending] = {}  # parameters in flight

    def make_ready(self, unit: Unit) -> None:
        if unit in self.sharded and unit not in self.in_use:
            super().make_ready(unit)
            for ahead in self.order.units_after(self.depth):
                if ahead.can_gather:
                    self._gather(ahead)
        self._wait_gathered(unit)

    def publish(self, unit: Unit, *, ahead: bool = True) -> None:
        """Start O -> P; `await_published` follows when all units have begun."""
        super().publish(unit)
        if ahead and self.depth and unit in self.sharded and unit in self._first_units():
            self._gather(unit)  # the next step begins with it

    def await_published(self) -> None:
        for unit in list(self._arriving):
            if unit not in self.sharded:
                self._wait_gathered(unit)

    def wait(self) -> None:
        self.await_published()
        for pending in self._arriving.values():
            pending.wait()

    def drain(self) -> None:
        for unit in list(self._arriving):
            self._wait_gathered(unit)
        for unit in self.sharded - self.in_use:
            if unit.residence is Residence.READY:
                self.free(unit, forget=unit.has_private_store)

    def abandon_microbatch(self) -> None:
        for unit in self.sharded:
            self._wait_gathered(unit)
        super().abandon_microbatch()

    def _first_units(self) -> Collection[Unit]:
        """Return the units that the next step begins with, of those in one pool the first."""
        first = self.order_of_microbatch.first_units(1 + self.depth)
        return {unit.store: unit for unit in reversed(first)}.values()

    def _gather(self, unit: Unit) -> None:
        if unit.residence is Residence.FREED:  # else it was gathered ahead
            super()._gather(unit)

    def _started(self, unit: Unit, pending: Pending) -> None:
        self._arriving[unit] = pending

    def _wait_gathered(self, unit: Unit) -> None:
        """Wait for the unit if it is in flight."""
        pending = self._arriving.pop(unit, None)
        if pending is not None:
            super()._started(unit, pending)

    def _evict_tenant(self, unit: Unit) -> None:
        """Free a tenant that was wrongly gathered ahead."""
        assert unit.store is not None
        tenant = unit.store.tenant
        assert isinstance(tenant, Unit)
        if tenant in self.in_use:
            super()._evict_tenant(unit)
            return
        self._wait_gathered(tenant)
        self.free(tenant, forget=False)
