"""Gathered parameters lie in a store: a private one, or a pool that units use in turns.

    pool 0   | block 0 | block 2 | block 4 | ...      a unit always returns to the same pool at the same place,
    pool 1   |    block 1 | block 3 | block 5 | ...   so that the views autograd saved in forward are right again
                                                      once the unit is gathered for backward

A pool is leased (one tenant at a time) and remembers whose values it still holds: a tenant that comes back before
anybody else needs no gather.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zeroexp.comm.base import GatherMemory, GatherPart, Pieces
from zeroexp.comm.gather_memory import lay_side_by_side


class Store(Protocol):
    memory: Tensor  # flat, uint8
    valid_for: object | None  # the unit whose valid values lie here
    tenant: object | None  # the unit that may write and read here now

    def lay(self, unit: Pieces) -> list[GatherPart]: ...
    def lease(self, tenant: object) -> None: ...
    def release(self, *, forget: bool) -> None: ...
    @property
    def is_free(self) -> bool: ...


class Pool:
    """A pool is memory shared by units that are never needed at the same time; the transport provides it."""

    def __init__(self, memory: GatherMemory) -> None:
        self.memory = memory.memory
        self.valid_for: object | None = None
        self.tenant: object | None = None
        self.lay = memory.lay

    @property
    def is_free(self) -> bool:
        return self.tenant is None

    def lease(self, tenant: object) -> None:
        if self.tenant not in (None, tenant):
            raise RuntimeError(f"pool is leased to {self.tenant}, {tenant} can not have it")
        self.tenant = tenant

    def release(self, *, forget: bool) -> None:
        self.tenant = None
        if forget:
            self.valid_for = None


class PrivateStore:
    """A private store belongs to one unit and returns its memory to the allocator while its values are not kept.

    The storage is resized, never replaced: tensors that autograd saved keep pointing at it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.valid_for: object | None = None
        self.tenant: object | None = None
        self._num_bytes = num_bytes

    def lay(self, unit: Pieces) -> list[GatherPart]:
        return lay_side_by_side(unit, self.memory)

    @property
    def is_free(self) -> bool:
        return self.tenant is None

    def lease(self, tenant: object) -> None:
        self.tenant = tenant
        if self.valid_for is None:
            self.memory.untyped_storage().resize_(self._num_bytes)

    def release(self, *, forget: bool) -> None:
        self.tenant = None
        if forget:
            self.valid_for = None
            self.memory.untyped_storage().resize_(0)
