"""Which units will be needed next: those that came next in the first microbatch."""

from __future__ import annotations

from zeroexp.sharding.unit import Unit


class GatherOrder:
    """The units one microbatch gathers, recorded in the first and expected of the following ones."""

    def __init__(self) -> None:
        self.order: list[Unit] = []
        self._position = 0
        self._lost = False

    def rewind(self) -> None:
        if self._lost:
            self.order = []
        self._position = 0
        self._lost = False

    def record(self, unit: Unit) -> None:
        """`unit` was needed now. Another one than expected switches guessing off until the next microbatch."""
        if self._lost:
            return
        if self._position == len(self.order):
            self.order.append(unit)
        self._lost = self.order[self._position] is not unit
        self._position += not self._lost

    def after(self, depth: int) -> list[Unit]:
        return [] if self._lost else self.order[self._position : self._position + depth]

    def first(self, depth: int) -> list[Unit]:
        return [] if self._lost else self.order[:depth]
