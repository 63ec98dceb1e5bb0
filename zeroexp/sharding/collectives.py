"""The moves between ranks, each once, and the bytes they send. The only door to the transports that carry them.

* `direct` (CPU): direct.py, over shared memory where ranks share a host, else over messages (`gloo`: always).
* `native` (NCCL, fake): native.py, the backend's own collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.measure.record import Traffic
from zeroexp.sharding.direct import Direct
from zeroexp.sharding.moves import GatherPart, Pending, ReducePart
from zeroexp.sharding.native import Native
from zeroexp.world import World

Sent = tuple[Pending, int]  # and the bytes this rank sends


class Transport(Protocol):
    @property
    def staging_bytes(self) -> int:
        """Shared memory of gradients on their way to neighbours."""
        ...

    @property
    def shared_bytes(self) -> int:
        """All memory that neighbours map: outside of torch's allocator."""
        ...

    @property
    def moves_on_wait(self) -> bool:
        """A move does its work when it is waited for: starting it early gains nothing."""
        ...

    @property
    def reductions_in_flight(self) -> int:
        """How many may be under way beside the one just launched."""
        ...

    @property
    def page_bytes(self) -> int:
        """The largest pages among the ranks' machines, known after `meet`."""
        ...

    @property
    def gathered(self) -> int | None:
        """A checksum below 2**32 of what was gathered so far; None where ranks may gather different things."""
        ...

    def meet(self) -> bool: ...
    def reserve(self, rest_bytes: int, slot_bytes: int) -> None: ...
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...
    def place_of(self, tensor: Tensor) -> tuple[int, int] | None: ...
    def offer(self, parts: Sequence[GatherPart], offer: int | None) -> int: ...
    def all_gather(self, parts: Sequence[GatherPart], offer: int | None, what: str) -> Sent: ...
    def reduce_scatter(self, parts: Sequence[ReducePart], what: str) -> Sent: ...
    def all_reduce(self, parts: Sequence[ReducePart], what: str) -> Sent: ...
    def quiesce(self) -> None: ...


class Collectives:
    """The three moves and the sum of a scalar, over all ranks, counted by kind of message.

    transport: "direct" (over shared memory where ranks share a host), "gloo" (direct, but always by message),
    "native" (the backend's own collectives), or "auto": direct on CPU, native elsewhere.
    """

    def __init__(self, world: World, *, transport: str = "auto"):
        if transport == "auto":
            transport = "direct" if world.backend == "gloo" else "native"
        self._transport: Transport = (
            Native(world.rank, world.size)
            if transport == "native"
            else Direct(world, share_memory=transport == "direct")
        )
        self.world = world
        self.traffic = Traffic()

    def meet(self) -> bool:
        """Find the ranks of this host; returns whether that is all of them. Called once, by all ranks."""
        return self._transport.meet()

    def reserve(self, rest_bytes: int, slot_bytes: int) -> None:
        """Say once how much memory `empty` will be asked for, and how much the largest reduction sends."""
        self._transport.reserve(rest_bytes, slot_bytes)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for parameters at rest, from where peers can take it best."""
        return self._transport.empty(numel, dtype, self.world.device)

    @property
    def maps_memory(self) -> bool:
        """Whether memory from `empty` is backed by a file, see `place_of`."""
        return self._transport.shared_bytes > 0

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Open file and offset in it of memory from `empty`; None where no file backs it."""
        return self._transport.place_of(tensor)

    @property
    def page_bytes(self) -> int:
        """Pages that layouts are cut for, the same on all ranks once they met."""
        return self._transport.page_bytes

    @property
    def staging_bytes(self) -> int:
        return self._transport.staging_bytes

    @property
    def shared_bytes(self) -> int:
        return self._transport.shared_bytes

    @property
    def moves_on_wait(self) -> bool:
        return self._transport.moves_on_wait

    @property
    def reductions_in_flight(self) -> int:
        return self._transport.reductions_in_flight

    @property
    def gathered(self) -> int | None:
        """A checksum of what was gathered so far; None where nothing wrong can come of a difference."""
        return self._transport.gathered

    def quiesce(self) -> None:
        """Afterwards parameters at rest may be overwritten: every peer has read what it was handed."""
        self._transport.quiesce()

    def offer(self, parts: Sequence[GatherPart], offer: int | None = None) -> int:
        """My pieces of these parts will not change before `quiesce`. Returns what `all_gather` knows the offer by.

        offer: the one that this one follows, of the same parts. Ranks make their first offers in one order.
        """
        return self._transport.offer(parts, offer)

    def all_gather(
        self,
        parts: Sequence[GatherPart],
        kind: str,
        offer: int | None = None,
        what: str = "parameters",
    ) -> Pending:
        """sharded -> replicated, of parts that were offered, now if not before. `what` they are, for errors."""
        return self._count(kind, self._transport.all_gather(parts, offer, f"the {kind} of {what}"))

    def reduce_scatter(
        self, parts: Sequence[ReducePart], kind: str, what: str = "gradients"
    ) -> Pending:
        """partial -> sharded"""
        return self._count(kind, self._transport.reduce_scatter(parts, f"the {kind} of {what}"))

    def all_reduce(
        self, parts: Sequence[ReducePart], kind: str, what: str = "gradients"
    ) -> Pending:
        """partial -> replicated; the sum replaces `gradients` in place."""
        return self._count(kind, self._transport.all_reduce(parts, f"the {kind} of {what}"))

    def sum_scalar(self, value: Tensor, kind: str) -> Tensor:
        """The sum over ranks of a tiny tensor, in place."""
        self.sum_scalar_later(value, kind).wait()
        return value

    def sum_scalar_later(self, value: Tensor, kind: str) -> Pending:
        """The same in the background: `value` is the sum once this is waited for."""
        if self.world.size == 1:
            return Pending([])
        work = dist.all_reduce(value, async_op=True)
        num_bytes = 2 * value.nbytes * (self.world.size - 1) // self.world.size
        return self._count(kind, (Pending([work]), num_bytes))

    def same_everywhere(self, number: int) -> bool:
        """Whether all ranks hold the same non-negative number below 2**62."""
        extremes = torch.tensor([number, -number], device=self.world.device)
        if self.world.size > 1:
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        return bool(extremes[0] == -extremes[1])

    def take_traffic(self) -> Traffic:
        """What was sent since the last call."""
        traffic, self.traffic = self.traffic, Traffic()
        return traffic

    def _count(self, kind: str, sent: tuple[Any, int]) -> Any:
        pending, num_bytes = sent
        sums, calls = self.traffic.bytes_by_kind, self.traffic.calls_by_kind
        sums[kind] = sums.get(kind, 0) + num_bytes
        calls[kind] = calls.get(kind, 0) + 1
        return pending
