"""Every rank hands each peer exactly the spans that peer owns, straight from the tensors they lie in.

It sums what it is handed in rank order: bit-equal to one process that adds the ranks one after the other. gloo's own
reduce-scatter is an all-reduce inside, with twice the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeroexp.sharding.channels import Channel, GlooChannel
from zeroexp.sharding.form import REDUCTIONS_IN_FLIGHT, num_slots
from zeroexp.sharding.moves import GatherPart, Pending, ReducePart
from zeroexp.sharding.shared_memory import Arena, Neighbourhood, SharedChannel
from zeroexp.world import World

TIMEOUT_SECONDS = 600.0  # a neighbour silent for longer is taken for dead


class Direct:
    """Every rank hands each peer what that peer is to have, over the best channel between the two."""

    def __init__(self, world: World, *, share_memory: bool):
        self._rank = world.rank
        self._ranks = range(world.size)
        self._peers = [(world.rank + step) % world.size for step in range(1, world.size)]
        self._channels: dict[int, Channel] = {p: GlooChannel(p) for p in self._peers}
        self._tag = 0
        self._world = world
        self._share_memory = share_memory and world.size > 1
        self._neighbours: Neighbourhood | None = None
        self._arena: Arena | None = None

    @property
    def moves_on_wait(self) -> bool:
        return self._road == "direct"

    @property
    def reductions_in_flight(self) -> int:
        return REDUCTIONS_IN_FLIGHT[self._road]

    def meet(self) -> bool:
        if not self._share_memory:
            return False
        self._neighbours = Neighbourhood(self._world, TIMEOUT_SECONDS)
        return self._road == "direct"

    def reserve(self, rest_bytes: int, slot_bytes: int) -> None:
        if self._neighbours is not None and self._neighbours.peers:
            self._arena = Arena(rest_bytes, slot_bytes, num_slots(self._road))
            self._channels.update(self._neighbours.open(self._arena))

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._arena is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return self._arena.empty(numel, dtype)

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        return None if self._arena is None else (self._arena.file, self._arena.offset_of(tensor))

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
            if not part.in_place and own.data_ptr() != piece.data_ptr():
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
        """My own term stays where autograd left it until the others' arrive: copying it away would cost a tenth."""
        tag = self._next_tag()
        outs = [(out, part.accumulate) for part in parts for out in part.out]
        like = [out for out, _ in outs]
        arrivals = {p: self._channels[p].receive(tag, like, into=False) for p in self._peers}
        mine = self._spans(parts, self._rank)
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
                sum_into(out, [terms[rank][index] for rank in self._ranks], accumulate)
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
    def _road(self) -> str:
        """As forms name it: `direct` where all peers are neighbours, else messages."""
        neighbours = self._neighbours.peers if self._neighbours is not None else []
        return "direct" if len(neighbours) == len(self._peers) else "gloo"

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


def sum_into(out: Tensor, terms: Sequence[Tensor], accumulate: bool) -> None:
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
