"""Rows of settings in which every two values of every two settings meet: what one setting breaks, or two together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations, product
from typing import Any

Row = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]


def pairwise(axes: Axes, *, every: Sequence[str], legal: Callable[[Row], bool]) -> list[Row]:
    """Legal rows that together hold every legal pair of values, and every combination of the axes in `every`.

    `legal` is also asked about rows that lack values: whether nothing in them is illegal so far.
    Greedy and without chance: each row takes, axis by axis, the value that adds most pairs not seen yet.
    """
    seen: set[tuple] = set()  # pairs, both ways round
    rows: list[Row] = []

    def add(start: Row) -> bool:
        row = _complete(start, axes, seen, legal)
        if row is None:
            return False
        rows.append(row)
        seen.update(permutations(row.items(), 2))
        return True

    for values in product(*(axes[name] for name in every)):
        add(dict(zip(every, values, strict=True)))
    for first, second in combinations(axes, 2):
        for a, b in product(axes[first], axes[second]):
            if ((first, a), (second, b)) not in seen:
                add({first: a, second: b})
    return rows


def _complete(start: Row, axes: Axes, seen: set[tuple], legal: Callable[[Row], bool]) -> Row | None:
    """`start` and a value for every other axis, the most rewarding legal ones; None if there is no legal row."""
    if not legal(start):
        return None
    free = [name for name in axes if name not in start]
    if not free:
        return {name: start[name] for name in axes}
    name = free[0]
    gain = {value: _num_new(start, name, value, seen) for value in axes[name]}
    for value in sorted(axes[name], key=lambda value: -gain[value]):
        row = _complete({**start, name: value}, axes, seen, legal)
        if row is not None:
            return row
    return None


def _num_new(start: Row, name: str, value: Any, seen: set[tuple]) -> int:
    return sum((other, (name, value)) not in seen for other in start.items())
