"""The second phase of a reduction: what the ranks of each group have summed is summed between the groups.

    phase     between whom                          what                            by
    first     the S ranks of a group, neighbours    the gradients of a bucket       reduce-scatter
    second    the K ranks of one place              this rank's sums, 1/S of it     all-reduce

So the link between groups, which may be the slow one, carries 2 (K-1)/K P/S bytes from each rank for P of gradients.
A second phase travels while backward goes on; `finish` waits for the last ones. It begins where the first phase is
waited for, which all ranks do in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from zeroexp.comm.base import Pending, ReducePart, Sent, Transport
from zeroexp.comm.facts import Facts
from zeroexp.comm.sizes import chunk_of_sums


class BetweenReplicas:
    """The sums between this rank and those that hold the same pieces."""

    def __init__(self, transport: Transport, num_replicas: int):
        self.transport = transport
        self._num_replicas = num_replicas
        self._in_flight: deque[Pending] = deque()

    def sum(self, sums: Sequence[Tensor], what: str) -> Sent:
        """Start to replace flat tensors by their sums over replicas. All ranks call it in one order, with any sizes."""
        chunk = chunk_of_sums(tuple(each.numel() for each in sums), self._num_replicas)
        return self.transport.all_reduce([ReducePart(chunk, list(sums))], what)

    def keep(self, pending: Pending) -> None:
        """Let a sum travel on, and wait for the oldest where more are in flight than the transport may have."""
        self._in_flight.append(pending)
        while len(self._in_flight) > self.transport.facts.reductions_in_flight:
            self._in_flight.popleft().wait()

    def finish(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().wait()


def common_facts(facts: Sequence[Facts]) -> Facts:
    """Return the facts that hold for every rank, since one group may share a host and another not."""
    names = {each.name for each in facts}
    return replace(
        facts[0],
        name=names.pop() if len(names) == 1 else "mixed",
        reductions_in_flight=min(each.reductions_in_flight for each in facts),
        moves_on_wait=all(each.moves_on_wait for each in facts),
        shares_memory=any(each.shares_memory for each in facts),
    )
