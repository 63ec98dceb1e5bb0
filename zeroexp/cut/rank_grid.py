"""Which ranks shard among themselves, and which hold the same: a grid of groups (rows) and places (columns).

    6 ranks, 2 groups         place 0    place 1    place 2
    group 0                   rank 0     rank 1     rank 2         a row shards one copy of all states among its ranks
    group 1                   rank 3     rank 4     rank 5         a column holds the same pieces (`holders`)

Engine, plan and safety ask this file which ranks are whose.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankGrid:
    """The ranks 0 to size - 1 in equal groups of neighbours."""

    size: int
    num_groups: int = 1

    @property
    def group_size(self) -> int:
        return self.size // self.num_groups

    def place(self, rank: int) -> int:
        """Return the number of a rank in its group."""
        return rank % self.group_size

    def group_number(self, rank: int) -> int:
        """Return the number of a rank's group, which is its number among those that hold the same."""
        return rank // self.group_size

    def group(self, rank: int) -> range:
        """Return the ranks that shard with this one, by place."""
        first = self.group_number(rank) * self.group_size
        return range(first, first + self.group_size)

    def holders(self, rank: int) -> range:
        """Return the ranks that have this one's place, by group."""
        return range(self.place(rank), self.size, self.group_size)

    @property
    def by_place(self) -> tuple[int, ...]:
        """All ranks, those of one place side by side: in this order pieces are cut again for the ranks of a place."""
        return tuple(rank for place in range(self.group_size) for rank in self.holders(place))

    def number_by_place(self, rank: int) -> int:
        """Return the index of a rank in `by_place`."""
        return self.place(rank) * self.num_groups + self.group_number(rank)


@dataclass(frozen=True, kw_only=True)
class GridOptions:
    replicas: int = 1  # groups of ranks that each hold all states, sharded inside of the group

    def grid(self, world_size: int) -> RankGrid:
        """Return which of these ranks shard among themselves."""
        return RankGrid(world_size, self.replicas)
