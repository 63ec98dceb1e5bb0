"""The moves between ranks, each once, and the bytes they send. The only caller of the ops.

Two transports carry the same moves:

* `Direct` (CPU): every rank hands each peer exactly the spans that peer owns, straight from the tensors they lie
  in, and sums what it is handed in rank order. gloo's own reduce-scatter is an all-reduce inside, with twice the
  bytes; and a sum in rank order is bit-equal to one process that adds the ranks one after the other.
* `Native` (NCCL, fake): the backend's reduce-scatter and all-gather where sections are even, else its reduce and
  broadcast, one for each owner.

[Note: parts] A move takes the parts of one unit together: they travel as one collective. Padding is never sent by
`Direct`; `Native` sends it, since the even primitives need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.measure.record import Traffic
from zeroexp.sharding.channels import Channel, GlooChannel
from zeroexp.sharding.layout import Chunk
from zeroexp.sharding.shared_memory import Arena, Neighbourhood, SharedChannel
from zeroexp.world import World

TIMEOUT_SECONDS = 600.0  # a neighbour silent for longer is taken for dead


@dataclass
class GatherPart:
    """One chunk whose sections become one `full` flat tensor on every rank; `piece` is this rank's section."""

    chunk: Chunk
    full: Tensor
    piece: Tensor


@dataclass
class ReducePart:
    """One chunk whose gradients are summed over ranks.

    gradients: a flat tensor for each member, in the dtype of the wire.
    out: a flat tensor for each span this rank owns; may be that very span of `gradients`.
    accumulate: add to `out` instead of overwriting it.
    """

    chunk: Chunk
    gradients: list[Tensor]
    out: list[Tensor] = field(default_factory=list)
    accumulate: bool = False


class Pending:
    """A move in flight. `wait` ends it, once: afterwards its results are where they were asked for."""

    def __init__(self, works: Sequence[Any], then: Callable[[], Pending | None] | None = None):
        self._works = works
        self._then = then

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        then, self._works, self._then = self._then, (), None
        follow = then() if then is not None else None
        if follow is not None:
            follow.wait()


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

    def reserve(self, rest_bytes: int, reduce_bytes: int) -> None: ...
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...
    def offer(self, parts: Sequence[GatherPart]) -> int: ...
    def all_gather(self, parts: Sequence[GatherPart], offer: int) -> tuple[Pending, int]: ...
    def reduce_scatter(self, parts: Sequence[ReducePart]) -> tuple[Pending, int]: ...
    def all_reduce(self, parts: Sequence[ReducePart]) -> tuple[Pending, int]: ...
    def quiesce(self) -> None: ...


class Collectives:
    """The three moves and the sum of a scalar, over the ranks of one group, counted by kind of message.

    transport: "direct" (over shared memory where ranks share a host), "gloo" (direct, but always by message),
    "native" (the backend's own collectives), or "auto": direct on CPU, native elsewhere.
    """

    def __init__(self, world: World, *, transport: str = "auto", group: Any = None):
        group = group or dist.group.WORLD
        if transport == "auto":
            transport = "direct" if world.backend == "gloo" else "native"
        self._transport: Transport = (
            Native(group, world.rank, world.size)
            if transport == "native"
            else Direct(group, world, share_memory=transport == "direct")
        )
        self._group = group
        self.world = world
        self.traffic = Traffic()

    def reserve(self, rest_bytes: int, reduce_bytes: int) -> None:
        """Say once how much memory `empty` will be asked for, and how much the largest reduction sends."""
        self._transport.reserve(rest_bytes, reduce_bytes)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for parameters at rest, from where peers can take it best."""
        return self._transport.empty(numel, dtype, self.world.device)

    @property
    def staging_bytes(self) -> int:
        return self._transport.staging_bytes

    @property
    def shared_bytes(self) -> int:
        return self._transport.shared_bytes

    @property
    def moves_on_wait(self) -> bool:
        return self._transport.moves_on_wait

    def quiesce(self) -> None:
        """Afterwards parameters at rest may be overwritten: every peer has read what it was handed."""
        self._transport.quiesce()

    def offer(self, parts: Sequence[GatherPart]) -> int:
        """My pieces of these parts will not change before `quiesce`. Returns what `all_gather` knows the offer by."""
        return self._transport.offer(parts)

    def all_gather(
        self, parts: Sequence[GatherPart], kind: str, offer: int | None = None
    ) -> Pending:
        """sharded -> replicated, of parts that were offered, now if not before."""
        offer = self.offer(parts) if offer is None else offer
        return self._count(kind, self._transport.all_gather(parts, offer))

    def reduce_scatter(self, parts: Sequence[ReducePart], kind: str) -> Pending:
        """partial -> sharded"""
        return self._count(kind, self._transport.reduce_scatter(parts))

    def all_reduce(self, parts: Sequence[ReducePart], kind: str) -> Pending:
        """partial -> replicated; the sum replaces `gradients` in place."""
        return self._count(kind, self._transport.all_reduce(parts))

    def sum_scalar(self, value: Tensor, kind: str) -> Tensor:
        """The sum over ranks of a tiny tensor, in place."""
        self.sum_scalar_later(value, kind).wait()
        return value

    def sum_scalar_later(self, value: Tensor, kind: str) -> Pending:
        """The same in the background: `value` is the sum once this is waited for."""
        if self.world.size == 1:
            return Pending([])
        work = dist.all_reduce(value, group=self._group, async_op=True)
        num_bytes = 2 * value.nbytes * (self.world.size - 1) // self.world.size
        return self._count(kind, (Pending([work]), num_bytes))

    def same_everywhere(self, number: int) -> bool:
        """Whether all ranks hold the same non-negative number below 2**62."""
        extremes = torch.tensor([number, -number], device=self.world.device)
        if self.world.size > 1:
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
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


class Direct:
    """Every rank hands each peer what that peer is to have, over the best channel between the two."""

    def __init__(self, group: Any, world: World, *, share_memory: bool):
        self._group = group
        self._rank = world.rank
        self._ranks = range(world.size)
        self._peers = [(world.rank + step) % world.size for step in range(1, world.size)]
        self._channels: dict[int, Channel] = {p: GlooChannel(group, p) for p in self._peers}
        self._tag = 0
        self._world = world
        self._share_memory = share_memory and world.size > 1
        self._arena: Arena | None = None

    @property
    def moves_on_wait(self) -> bool:
        return all(isinstance(channel, SharedChannel) for channel in self._channels.values())

    def reserve(self, rest_bytes: int, reduce_bytes: int) -> None:
        if not self._share_memory:
            return
        neighbours = Neighbourhood(self._world, self._group, TIMEOUT_SECONDS)
        if neighbours.peers:
            self._arena = Arena(rest_bytes, reduce_bytes)
            self._channels.update(neighbours.open(self._arena))

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._arena is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return self._arena.empty(numel, dtype)

    @property
    def staging_bytes(self) -> int:
        return self._arena.staging_bytes if self._arena is not None else 0

    @property
    def shared_bytes(self) -> int:
        return self._arena.num_bytes if self._arena is not None else 0

    def offer(self, parts: Sequence[GatherPart]) -> int:
        offer = self._next_tag()
        mine = self._pieces(parts)
        for channel in self._shared:
            channel.offer(offer, mine)
        return offer

    def all_gather(self, parts: Sequence[GatherPart], offer: int) -> tuple[Pending, int]:
        """Neighbours' pieces are copied where they lie; from other hosts they are received."""
        tag = self._next_tag()
        mine = self._pieces(parts)
        for part, piece in zip(parts, mine, strict=True):
            own = part.full[part.chunk.real_section(self._rank)]
            if own.data_ptr() != piece.data_ptr():
                own.copy_(piece)
        theirs = {p: [part.full[part.chunk.real_section(p)] for part in parts] for p in self._peers}
        remote = [p for p in self._peers if not isinstance(self._channels[p], SharedChannel)]
        received = self._hand_out(mine, {p: theirs[p] for p in remote}, tag)

        def copy() -> None:
            for peer in self._peers:
                channel = self._channels[peer]
                if isinstance(channel, SharedChannel):
                    channel.copy_offered(offer, theirs[peer])

        return Pending([received], copy), len(self._peers) * sum(piece.nbytes for piece in mine)

    def reduce_scatter(self, parts: Sequence[ReducePart]) -> tuple[Pending, int]:
        """My own term goes to `out` at once: then the gradients may be freed before the others' terms arrive."""
        tag = self._next_tag()
        outs = [(out, part.accumulate) for part in parts for out in part.out]
        like = [out for out, _ in outs]
        arrivals = {p: self._channels[p].receive(tag, like, into=False) for p in self._peers}
        mine = self._own_terms(parts)
        works: list[Any] = []
        num_bytes = 0
        for peer in self._peers:
            spans = self._spans(parts, peer)
            works += self._channels[peer].send(tag, spans)
            num_bytes += sum(span.nbytes for span in spans)

        def add_in_rank_order() -> None:
            terms = {peer: arrival.wait() for peer, arrival in arrivals.items()}
            terms[self._rank] = mine
            for index, (out, accumulate) in enumerate(outs):
                _sum_into(out, [terms[rank][index] for rank in self._ranks], accumulate)
            for arrival in arrivals.values():
                arrival.release()

        return Pending(works, add_in_rank_order), num_bytes

    def all_reduce(self, parts: Sequence[ReducePart]) -> tuple[Pending, int]:
        """A reduce-scatter in place, then every owner hands its sums to everyone."""
        for part in parts:
            part.out = self._spans([part], self._rank)
        reduced, num_bytes = self.reduce_scatter(parts)
        tag = self._next_tag()  # taken now: ranks reach the second half at different times
        mine = self._spans(parts, self._rank)
        theirs = {peer: self._spans(parts, peer) for peer in self._peers}
        num_bytes += len(self._peers) * sum(span.nbytes for span in mine)
        return Pending([reduced], lambda: self._hand_out(mine, theirs, tag)), num_bytes

    def quiesce(self) -> None:
        for channel in self._shared:
            channel.end_offers()
        for channel in self._shared:
            channel.await_end()

    @property
    def _shared(self) -> list[SharedChannel]:
        return [c for c in self._channels.values() if isinstance(c, SharedChannel)]

    def _pieces(self, parts: Sequence[GatherPart]) -> list[Tensor]:
        """My section of each part, padding left out."""
        return [part.piece[: _length(part.chunk.real_section(self._rank))] for part in parts]

    def _hand_out(self, mine: list[Tensor], theirs: dict[int, list[Tensor]], tag: int) -> Pending:
        """Mine to these peers, theirs into place. Receives first: a send that meets one saves a round trip."""
        arrivals = [self._channels[p].receive(tag, theirs[p], into=True) for p in theirs]
        works = [work for p in theirs for work in self._channels[p].send(tag, mine)]

        def arrive() -> None:
            for arrival in arrivals:
                arrival.wait()
                arrival.release()

        return Pending(works, arrive)

    def _own_terms(self, parts: Sequence[ReducePart]) -> list[Tensor]:
        """My gradients of the spans I own: in `out`, unless that holds a sum already."""
        terms: list[Tensor] = []
        for part in parts:
            spans = self._spans([part], self._rank)
            if not part.accumulate:
                for out, span in zip(part.out, spans, strict=True):
                    if out.data_ptr() != span.data_ptr():
                        out.copy_(span)
                spans = part.out
            terms += spans
        return terms

    def _spans(self, parts: Sequence[ReducePart], owner: int) -> list[Tensor]:
        """The gradients `owner` is to sum, as views."""
        return [
            part.gradients[span.member][span.start : span.stop]
            for part in parts
            for span in part.chunk.spans(owner)
        ]

    def _next_tag(self) -> int:
        """Moves are issued in one agreed order, so that equal counts mean the same move on every rank."""
        self._tag = (self._tag + 1) % (1 << 30)
        return self._tag


def _length(section: slice) -> int:
    return section.stop - section.start


def _sum_into(out: Tensor, terms: Sequence[Tensor], accumulate: bool) -> None:
    """out (+)= ((terms[0] + terms[1]) + terms[2]) + ...; `out` may be one of the terms, no other is written."""
    total = terms[0]
    own = next((i for i, term in enumerate(terms) if term.data_ptr() == out.data_ptr()), -1)
    scratch: Tensor | None = None
    for index, term in enumerate(terms[1:], 1):
        if accumulate or index < own:  # `out` still holds a value that is needed
            scratch = total = torch.add(total, term, out=scratch)
        else:
            total = torch.add(total, term, out=out)
    if accumulate:
        out.add_(total)
    elif total.data_ptr() != out.data_ptr():
        out.copy_(total)


class Native:
    """The backend's own collectives; sums run in the backend's order."""

    staging_bytes = shared_bytes = 0
    moves_on_wait = False

    def __init__(self, group: Any, rank: int, size: int):
        self._group = group
        self._rank = rank
        self._size = size

    def reserve(self, rest_bytes: int, reduce_bytes: int) -> None:
        """Any memory will do."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def quiesce(self) -> None:
        """The backend has read a tensor when the move that sends it was waited for."""

    def offer(self, parts: Sequence[GatherPart]) -> int:
        return 0  # the backend reads a piece when it is gathered

    def all_gather(self, parts: Sequence[GatherPart], offer: int) -> tuple[Pending, int]:
        works: list[Any] = []
        num_bytes = 0
        for part in parts:
            if part.chunk.even:
                works.append(_all_gather(part.full, part.piece, self._group))
                num_bytes += part.piece.nbytes * (self._size - 1)
                continue
            own = part.full[part.chunk.section(self._rank)]
            if own.data_ptr() != part.piece.data_ptr():
                own.copy_(part.piece)
            for owner in range(self._size):
                section = part.full[part.chunk.section(owner)]
                works.append(self._async(dist.broadcast, section, owner))
            num_bytes += own.nbytes * (self._size - 1)
        return Pending(works), num_bytes

    def reduce_scatter(self, parts: Sequence[ReducePart]) -> tuple[Pending, int]:
        works: list[Any] = []
        flats = [_flatten(part) for part in parts]
        sections: list[Tensor] = []
        for part, flat in zip(parts, flats, strict=True):
            own = flat[part.chunk.section(self._rank)]
            if part.chunk.even:
                own = torch.empty_like(own)
                works.append(_reduce_scatter(own, flat, self._group))
            else:
                for owner in range(self._size):
                    section = flat[part.chunk.section(owner)]
                    works.append(self._async(dist.reduce, section, owner))
            sections.append(own)

        def hand_out() -> None:
            for part, own in zip(parts, sections, strict=True):
                for span, out in zip(part.chunk.spans(self._rank), part.out, strict=True):
                    _sum_into(out, [own[span.offset : span.offset + span.numel]], part.accumulate)

        sent = sum(f.nbytes - s.nbytes for f, s in zip(flats, sections, strict=True))
        return Pending(works, hand_out), sent

    def all_reduce(self, parts: Sequence[ReducePart]) -> tuple[Pending, int]:
        flats = [_flatten(part) for part in parts]
        works = [dist.all_reduce(flat, group=self._group, async_op=True) for flat in flats]

        def spread() -> None:
            for part, flat in zip(parts, flats, strict=True):
                for member, gradient in zip(part.chunk.members, part.gradients, strict=True):
                    gradient.copy_(flat[member.start : member.stop])

        sent = 2 * sum(flat.nbytes for flat in flats) * (self._size - 1) // self._size
        return Pending(works, spread), sent

    def _async(self, op: Callable[..., Any], section: Tensor, owner: int) -> Any:
        return op(section, owner, group=self._group, async_op=True)


def _flatten(part: ReducePart) -> Tensor:
    """The chunk's gradients as one padded flat tensor."""
    flat = part.gradients[0].new_zeros(part.chunk.padded_numel)
    for member, gradient in zip(part.chunk.members, part.gradients, strict=True):
        flat[member.start : member.stop].copy_(gradient)
    return flat


def _all_gather(full: Tensor, piece: Tensor, group: Any) -> Any:
    op = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in 2.13
    return op(full, piece, group=group, async_op=True)


def _reduce_scatter(own: Tensor, flat: Tensor, group: Any) -> Any:
    op = (
        getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    )  # renamed in 2.13
    return op(own, flat, group=group, async_op=True)
