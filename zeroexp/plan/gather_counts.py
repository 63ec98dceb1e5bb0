"""Count how often each unit is gathered in a step: the uses of a microbatch are replayed on memory without bytes.

[Note: what is still there] A pool keeps the values of the unit that used it last. So with keep=last a unit is gathered
unless it is also the unit that used its pool before. Gathering ahead changes no count, since it fills every pool in the
order of the uses. After the optimizer's step all values are out of date.

[Note: microbatches] The first microbatch of a run tells which units find their pool in use: they have memory of their
own from then on. The first microbatch of a step finds no values. Each further one finds what the one before has left,
and that is always the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

ROOT = 0  # its place among the units


class Event(Enum):
    """What happens to a unit, by the names that sharding/gathers.py gives it."""

    MAKE_READY = auto()
    AFTER_FORWARD = auto()
    AFTER_BACKWARD = auto()


class Use(NamedTuple):
    event: Event
    unit: int


def listed_order(num_units: int) -> list[Use]:
    """Return the uses of a microbatch in which units run as they are listed, inside the root, and back again."""
    inner = range(1, num_units)
    forward = [Use(event, i) for i in inner for event in (Event.MAKE_READY, Event.AFTER_FORWARD)]
    backward = [
        Use(event, i) for i in reversed(inner) for event in (Event.MAKE_READY, Event.AFTER_BACKWARD)
    ]
    begin, end = Use(Event.MAKE_READY, ROOT), Use(Event.AFTER_FORWARD, ROOT)
    return [begin, *forward, end, begin, *backward]


def gathers_of_step(
    uses: Sequence[Use], pools: Sequence[Sequence[int]], *, keep: str, accumulation: int
) -> Counter[int]:
    """Return the gathers of each unit in one step.

    uses: those of a microbatch. pools: for each, the units that take turns in it; all others have their own memory.
    keep: none | last | all. accumulation: the number of microbatches in a step.
    """
    memory = _Memory(pools, keep)
    memory.count(uses)
    memory.forget()
    first, further = memory.count(uses), memory.count(uses)
    return Counter({unit: n + (accumulation - 1) * further[unit] for unit, n in first.items()})


def most_beside_pools(
    uses: Sequence[Use], pools: Sequence[Sequence[int]], sizes: Sequence[int], *, keep: str
) -> int:
    """Return the most bytes of units that lie gathered outside of pools at once; `sizes` are those of all units."""
    memory = _Memory(pools, keep)
    memory.count(uses)  # it tells which units find their pool in use
    return max(
        (sum(sizes[unit] for unit in units) for units in memory.beside_pools(uses)), default=0
    )


class _Memory:
    """This object knows of every pool who uses it and whose values lie there; a negative place is a unit's own."""

    def __init__(self, pools: Sequence[Sequence[int]], keep: str) -> None:
        self._place = {unit: place for place, units in enumerate(pools) for unit in units}
        self._keep = keep
        self._tenant: dict[int, int] = {}
        self._valid: dict[int, int] = {}

    def forget(self) -> None:
        """Let the optimizer's step change all weights."""
        self._valid.clear()

    def count(self, uses: Sequence[Use]) -> Counter[int]:
        """Return the gathers of each unit in a microbatch."""
        counts = Counter(self._gathered(uses))
        for unit in [*self._tenant.values()]:
            self._free(unit)
        return counts

    def beside_pools(self, uses: Sequence[Use]) -> Iterator[list[int]]:
        """Yield the units that have memory of their own and are gathered, after each use of a microbatch."""
        for use in uses:
            for _ in self._gathered([use]):
                pass
            yield [unit for place, unit in self._tenant.items() if place < 0]

    def _gathered(self, uses: Sequence[Use]) -> Iterator[int]:
        for event, unit in uses:
            if event is Event.MAKE_READY:
                if self._must_gather(unit):
                    yield unit
            elif event is Event.AFTER_BACKWARD or not self._is_kept(unit):
                self._free(unit)

    def _must_gather(self, unit: int) -> bool:
        """Make `unit` the tenant of its place; tell whether its values did not lie there."""
        place = self._place_of(unit)
        if self._tenant.get(place, unit) != unit:
            place = self._place[unit] = -1 - unit
        was_there = unit in (self._tenant.get(place), self._valid.get(place))
        self._tenant[place] = self._valid[place] = unit
        return not was_there

    def _free(self, unit: int) -> None:
        place = self._place_of(unit)
        if self._tenant.get(place) == unit:
            del self._tenant[place]
            if self._keep == "none" or place < 0:
                del self._valid[place]

    def _is_kept(self, unit: int) -> bool:
        """Tell whether `unit` stays gathered from forward to backward."""
        return self._keep == "all" or (self._keep == "last" and unit == ROOT)

    def _place_of(self, unit: int) -> int:
        return self._place.get(unit, -1 - unit)
