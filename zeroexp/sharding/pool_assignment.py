"""This file decides in which memory each unit's gathered parameters lie: in a pool or in its own.

Units that never run inside each other take turns in pools; there is one pool more than units gathered ahead. A unit
that is kept between forward and backward, or inside of which others run (the root), has memory of its own. A unit that
finds its pool in use also gets its own memory (schedule.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.comm.collectives import Collectives
from zeroexp.sharding.grouping import outer_names
from zeroexp.sharding.pools import Pool, PrivateStore
from zeroexp.sharding.unit import Unit


def assign_memory(
    units: Sequence[Unit], keep: str, num_pools: int, wire: Collectives
) -> list[Pool]:
    """Give memory to every sharded unit, which frees it, and return the pools.

    keep: none | last | all, the units that stay gathered between forward and backward.
    """
    if not units[0].is_sharded:
        return []
    private = private_units([unit.name for unit in units], keep)
    alone = [unit for unit in units if unit.name in private]
    sharing = [unit for unit in units if unit.name not in private]
    pools: list[Pool] = []
    for index in range(num_pools):
        tenants = sharing[index::num_pools]
        pools.append(Pool(wire.gather_memory([unit.pieces() for unit in tenants])))
        for unit in tenants:
            unit.use_store(pools[-1])
    for unit in alone:
        unit.use_store(PrivateStore(unit.full_bytes, wire.world.device))
    return pools


def private_units(names: Sequence[str], keep: str) -> set[str]:
    """Return the units that cannot share a pool: kept ones, and those inside of which others run ("" is the root)."""
    if keep == "all":
        return set(names)
    around = {outer for name in names for outer in ("", *outer_names(name))}
    return around.intersection(names)
