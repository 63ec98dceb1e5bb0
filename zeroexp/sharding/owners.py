"""Layouts that keep parameters whole ask here which rank owns which parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeroexp.registry import Registry
from zeroexp.sharding.chunk import ParameterSpec


def own_contiguously(specs: Sequence[ParameterSpec], world_size: int) -> dict[str, int]:
    """Give each rank equally many consecutive parameters, whatever their size: the reference's rule, and its skew."""
    per_rank = -(-len(specs) // world_size)
    return {spec.name: index // per_rank for index, spec in enumerate(specs)}


def own_greedily(specs: Sequence[ParameterSpec], world_size: int) -> dict[str, int]:
    """Give the least loaded rank the largest parameter left (longest processing time); never worse than contiguous."""
    owner_of: dict[str, int] = {}
    load = [0] * world_size
    for spec in sorted(specs, key=lambda spec: -spec.numel * spec.itemsize):
        rank = load.index(min(load))
        owner_of[spec.name] = rank
        load[rank] += spec.numel * spec.itemsize
    contiguous = own_contiguously(specs, world_size)
    return owner_of if max(load) <= fullest_bytes(specs, contiguous) else contiguous


def fullest_bytes(specs: Sequence[ParameterSpec], owner_of: dict[str, int]) -> int:
    """Return the bytes that the fullest rank owns."""
    load: dict[int, int] = {}
    for spec in specs:
        owner = owner_of[spec.name]
        load[owner] = load.get(owner, 0) + spec.numel * spec.itemsize
    return max(load.values(), default=0)


OwnersRule = Callable[[Sequence[ParameterSpec], int], dict[str, int]]
_OWNERS: dict[str, OwnersRule] = {"contiguous": own_contiguously, "greedy": own_greedily}
OWNERS = Registry("strategy.owners", "zeroexp.owners", _OWNERS, needs="a function")
