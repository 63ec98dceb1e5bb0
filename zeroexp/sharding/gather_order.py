"""The order in which units are gathered repeats itself, microbatch after microbatch: prefetching relies on it."""

from __future__ import annotations

from zeroexp.sharding.unit import Unit


class GatherOrder:
    """The order of gathers is recorded in the first microbatch and expected of the following ones."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        # Index of the first unit that backward needed: forward gathers none ahead from there on, since these would lie
        # beside the logits.
        self._turn: int | None = None
        self._position = 0
        self._lost = False

    def rewind(self) -> None:
        if self._lost:
            self.units, self._turn = [], None
        self._position = 0
        self._lost = False

    def record(self, unit: Unit, *, in_backward: bool) -> None:
        """Record that `unit` is needed now. An unexpected unit switches guessing off until the next microbatch."""
        if self._lost:
            return
        if in_backward and self._turn is None:
            self._turn = self._position
        if self._position == len(self.units):
            self.units.append(unit)
        self._lost = self.units[self._position] is not unit
        self._position += not self._lost

    def units_after(self, depth: int) -> list[Unit]:
        stop = self._position + depth
        if self._turn is not None and self._position <= self._turn:
            stop = min(stop, self._turn)
        return [] if self._lost else self.units[self._position : stop]

    def first_units(self, depth: int) -> list[Unit]:
        return [] if self._lost else self.units[:depth]
