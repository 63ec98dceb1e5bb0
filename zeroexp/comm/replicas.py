"""The second phase of a reduction: what the ranks of each group have summed is summed between the groups.

    phase     between whom                          what                            by
    first     the S ranks of a group, neighbours    the gradients of a bucket       reduce-scatter
    second    the K ranks of one place              this rank's sums, 1/S of it     all-reduce

So the link between groups, which may be the slow one, carries 2 (K-1)/K P/S bytes from each rank for P of gradients.
A second phase travels while backward goes on; `finish` waits for the last ones. It begins where the first phase is
waited for, which all ranks do in one order.

Where the optimizer rests over all ranks, what a group's rank holds is cut again for the K ranks of its place, which
update a share each. The all-reduce then has the step in its middle, and the link carries as many bytes:

    4 ranks, 2 groups     rank 0   rank 1  |  rank 2   rank 3
    piece, gradients      a b      c d     |  a b      c d        second phase: reduce-scatter
    master, moments       a        c       |  b        d          after the step: all-gather, of updated parameters
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from zeroexp.comm.base import GatherPart, Pending, ReducePart, Sent, Transport
from zeroexp.comm.shared_memory_sizes import chunk_of_sums
from zeroexp.comm.traits import TRAITS, TransportTraits
from zeroexp.cut.chunk import Chunk


class BetweenReplicas:
    """The moves between this rank and those that hold the same pieces, of which it has a number."""

    def __init__(self, transport: Transport, number: int, num_replicas: int):
        self.transport = transport
        self._number, self._num_replicas = number, num_replicas
        self._exposure = transport.expose((), None)
        self._in_flight: deque[Pending] = deque()

    def sum(self, sums: Sequence[Tensor], what: str, shares: Sequence[Chunk] = ()) -> Sent:
        """Start to replace flat tensors by their sums over replicas. All ranks call it in one order, with any sizes.

        shares: chunks of these tensors, of which each replica gets its own section alone; none: it gets all.
        """
        if not shares:
            chunk = chunk_of_sums(tuple(each.numel() for each in sums), self._num_replicas)
            return self.transport.all_reduce([ReducePart(chunk, list(sums))], what)
        left, parts = iter(sums), list[ReducePart]()
        for chunk in shares:
            terms = [next(left) for _ in chunk.members]
            own = [terms[s.member][s.start : s.stop] for s in chunk.spans(self._number)]
            parts.append(ReducePart(chunk, terms, own))
        return self.transport.reduce_scatter(parts, what)

    def gather_shares(self, parts: Sequence[GatherPart], what: str) -> Sent:
        """Start to replace each share of these pieces by that of the rank which updates it."""
        return self.transport.all_gather(parts, self._exposure, what)

    def keep(self, pending: Pending) -> None:
        """Let a sum travel on, and wait for the oldest where more are in flight than the transport may have."""
        self._in_flight.append(pending)
        while len(self._in_flight) > self.transport.traits.reductions_in_flight:
            self._in_flight.popleft().wait()

    def finish(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().wait()


def common_traits(traits: Sequence[TransportTraits]) -> TransportTraits:
    """Return the traits that hold for every rank, since one group may share a host and another not."""
    names = {each.name for each in traits}
    return replace(
        traits[0] if len(names) == 1 else TRAITS["mixed"],
        reductions_in_flight=min(each.reductions_in_flight for each in traits),
        moves_on_wait=all(each.moves_on_wait for each in traits),
        shares_memory=any(each.shares_memory for each in traits),
    )
