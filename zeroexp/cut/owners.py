"""Layouts that keep parameters whole ask here which rank owns which parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapreplace
from typing import cast

from zeroexp.cut.chunk import ParameterSpec
from zeroexp.registry import Registry


def own_contiguously(specs: Sequence[ParameterSpec], world_size: int) -> dict[str, int]:
    """Give each rank equally many consecutive parameters, whatever their size: the reference's rule, and its skew."""
    per_rank = -(-len(specs) // world_size)
    return {spec.name: index // per_rank for index, spec in enumerate(specs)}


def own_greedily(specs: Sequence[ParameterSpec], world_size: int) -> dict[str, int]:
    """Give the least loaded rank the largest parameter left (longest processing time); never worse than contiguous."""
    owner_of: dict[str, int] = {}
    loads = [(0, rank) for rank in range(world_size)]  # a heap
    for spec in sorted(specs, key=lambda spec: -spec.numel * spec.itemsize):
        load, rank = loads[0]
        owner_of[spec.name] = rank
        heapreplace(loads, (load + spec.numel * spec.itemsize, rank))
    contiguous = own_contiguously(specs, world_size)
    return owner_of if max(loads)[0] <= fullest_bytes(specs, contiguous) else contiguous


def fullest_bytes(specs: Sequence[ParameterSpec], owner_of: dict[str, int]) -> int:
    """Return the bytes that the fullest rank owns."""
    load: dict[int, int] = {}
    for spec in specs:
        owner = owner_of[spec.name]
        load[owner] = load.get(owner, 0) + spec.numel * spec.itemsize
    return max(load.values(), default=0)


OwnersRule = Callable[[Sequence[ParameterSpec], int], dict[str, int]]
_OWNERS: dict[str, OwnersRule] = {"contiguous": own_contiguously, "greedy": own_greedily}
OWNERS = Registry(
    "strategy.owners",
    _OWNERS,
    needs="a function",
    arguments=lambda rule: {"": 2},
)


def assign_owners(rule: str, specs: Sequence[ParameterSpec], world_size: int) -> dict[str, int]:
    """Return the owner of each parameter. Raises ValueError for a rule of others that gives one to no rank."""
    owner_of = OWNERS[rule](specs, world_size)
    if rule not in OWNERS.own:
        _require_owners(f"strategy.owners={rule}", owner_of, specs, world_size)
    return owner_of


def _require_owners(
    key: str, owner_of: object, specs: Sequence[ParameterSpec], world_size: int
) -> None:
    if not isinstance(owner_of, dict):
        problem = f"returns a {type(owner_of).__name__}"
        raise ValueError(f"{key}: {problem}; return a dict from names to ranks")
    owners = cast(dict[str, object], owner_of)
    for spec in specs:
        owner = owners.get(spec.name)
        if type(owner) is not int or not 0 <= owner < world_size:
            problem, remedy = f"gives {spec.name} to rank {owner}", f"use 0 to {world_size - 1}"
            raise ValueError(f"{key}: {problem}; {remedy}, for each parameter")
