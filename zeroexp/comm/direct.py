"""Every rank hands each peer exactly the spans that peer owns, straight from the tensors they lie in.

The owner sums the terms in rank order, so that the result is bit-equal to one process that adds the ranks one after the
other. gloo's own reduce-scatter is an all-reduce inside, which sends twice the bytes.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroexp.comm.base import GatherPart, Pending, ReducePart, Transport, spans_of
from zeroexp.comm.packing import begin_alike
from zeroexp.comm.point_to_point import Channel, GlooChannel
from zeroexp.comm.shared_memory import Arena, Probe, SharedChannel, neighbour_identity, shown_probe
from zeroexp.comm.shared_memory_sizes import num_slots
from zeroexp.comm.traits import TRAITS, TransportTraits
from zeroexp.process import world as worlds
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World

# Each engine of a process has a range of tags, so that none takes another's messages. A tag is a C int.
MOST_ENGINES = 1 << 7  # engines with ranges of their own; after that the ranges begin again
NUM_TAGS = 1 << 24  # tags of one engine
GATHERS_APART = 16  # gathers of one unit that may be in flight at once
_engines = itertools.count()


class Direct(Transport):
    """Every rank hands each peer what that peer needs, over the best channel between the two.

    It has no `issued_checksum`: a gather receives the unit that it names, or waits.
    """

    def __init__(self, world: World, moves: Moves, *, share_memory: bool):
        super().__init__(world, moves)
        self._rank = world.rank
        self._ranks = range(world.size)
        self._peers = [(world.rank + step) % world.size for step in range(1, world.size)]
        # [Note: two counts] Ranks issue reductions in one agreed order, so that an equal count means the same reduction
        # on every rank. Gathers have counts of their own: over shared memory a rank may gather what others do not.
        self._num_exposures = self._num_reductions = 0
        self._num_gathers: dict[int, int] = {}  # exposure -> gathers of it
        self._first_tag = NUM_TAGS * (next(_engines) % MOST_ENGINES)
        # `reserve` replaces the channels to peers that share memory.
        self._channels: dict[int, Channel] = {
            peer: GlooChannel(world.numbers[peer], moves) for peer in self._peers
        }
        self._share_memory = share_memory and world.size > 1
        self._neighbours: list[int] = []  # peers that share memory
        self._arena: Arena | None = None
        self.traits = self._find_traits()

    def connect(self) -> None:
        if self._world.size == 1:
            return
        with shown_probe() as shown:
            mine = neighbour_identity(), shown, self._first_tag
            hosts, probes, first_tags = zip(*worlds.gather_objects(mine), strict=True)
            self._first_tag = max(first_tags)
            if self._share_memory:
                self._neighbours = self._find_neighbours(hosts, probes)
        self.traits = self._find_traits()

    def _find_neighbours(self, hosts: Sequence[Any], probes: Sequence[Probe]) -> list[int]:
        """Return the peers of this host; none if any of its ranks can not open a peer's file, so that all do alike."""
        number_of = self._world.numbers
        own = number_of[self._rank]
        peers = [p for p in self._peers if hosts[number_of[p]] == hosts[own]]
        problems = [probes[number_of[p]].problem() for p in peers]
        of_all = worlds.gather_objects(next(filter(None, problems), ""))
        ranks = [number for number, host in enumerate(hosts) if host == hosts[own]]
        found = [of_all[number] for number in ranks if of_all[number]]
        if found and own == ranks[0]:
            way = "so what they exchange is sent as messages, which takes longer"
            warnings.warn(
                f"ranks {ranks} of one host can not open each other's memory ({found[0]}), {way}",
                stacklevel=2,
            )
        return [] if found else peers

    def _find_traits(self) -> TransportTraits:
        """Return the traits of shared memory where all peers are neighbours, else those of messages to some or all."""
        messages = "mixed" if self._neighbours else "gloo"
        return TRAITS["direct" if len(self._neighbours) == len(self._peers) else messages]

    def reserve(self, resting: Sequence[int], slot_bytes: int) -> None:
        if not self._share_memory:
            return
        number_of = self._world.numbers
        peers = {number_of[peer]: peer for peer in self._neighbours}
        if peers:
            slots = num_slots(self.traits.name)
            self._arena = Arena(self._moves, [*peers], resting, slot_bytes, slots)
            self.staging_bytes = self._arena.staging_bytes
            self.held_shared_bytes = self._arena.num_bytes
        shown: list[Any] = worlds.gather_objects(
            self._arena.shown if self._arena is not None else None
        )
        if self._arena is not None:
            self._channels |= {peers[p]: self._arena.channel_to(p, shown[p]) for p in peers}
        worlds.barrier()  # all have opened what they write to

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._arena is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return self._arena.empty(numel, dtype)

    def expose(self, parts: Sequence[GatherPart], renewed: int | None) -> int:
        exposure = renewed
        if exposure is None:
            exposure = self._num_exposures = self._num_exposures + 1
        if self._arena is not None:
            self._arena.expose(exposure, self._pieces(parts))
        return exposure

    def all_gather(
        self, parts: Sequence[GatherPart], exposure: int, what: str
    ) -> tuple[Pending, int]:
        """Copy neighbours' pieces from their memory, and receive those of other hosts.

        Those come when their rank gathers the same, so that a different order is told (process/watchdog/differs.py).
        """
        remote = [p for p in self._peers if not isinstance(self._channels[p], SharedChannel)]
        if remote or self.gathers_together:  # else ranks may gather what others do not
            self._moves.record_collective(what)
        mine = self._pieces(parts)
        for part, piece in zip(parts, mine, strict=True):
            own = part.full[part.chunk.real_section(self._rank)]
            if not begin_alike(own, piece):
                own.copy_(piece)
        theirs = {p: [part.full[part.chunk.real_section(p)] for part in parts] for p in self._peers}
        tag = self._gather_tag(exposure)
        received = self._exchange(
            dict.fromkeys(remote, mine), {p: theirs[p] for p in remote}, tag, what
        )

        def copy() -> None:
            for peer in self._peers:
                channel = self._channels[peer]
                if isinstance(channel, SharedChannel):
                    channel.copy_exposed(exposure, theirs[peer], what)

        return Pending([received], copy), len(self._peers) * sum(piece.nbytes for piece in mine)

    def reduce_scatter(self, parts: Sequence[ReducePart], what: str) -> tuple[Pending, int]:
        """Leave this rank's own term where autograd put it until the others arrive.

        Copying it away would take a tenth longer. One of another dtype is cast by the sum: until then it is a copy,
        since a view would hold the gradients of all owners.
        """
        self._moves.record_collective(what)
        tag = self._reduction_tag()
        outs = [(out, part.accumulate) for part in parts for out in part.sums()]
        like = [out for out, _ in outs]
        arrivals = {p: self._channels[p].receive(tag, like, what, into=False) for p in self._peers}
        dtype = parts[0].dtype
        own = spans_of(parts, self._rank)
        mine = [term if dtype in (None, term.dtype) else term.clone() for term in own]
        works: list[Any] = []
        num_bytes = 0
        for peer in self._peers:
            spans = spans_of(parts, peer)
            works += self._channels[peer].send(tag, spans, what, dtype)
            num_bytes += sum(span.numel() * (dtype or span.dtype).itemsize for span in spans)

        def add_in_rank_order() -> None:
            terms = {peer: arrival.wait() for peer, arrival in arrivals.items()}
            terms[self._rank] = [
                _cast_term(term, out, accumulate)
                for term, (out, accumulate) in zip(mine, outs, strict=True)
            ]
            for index, (out, accumulate) in enumerate(outs):
                sum_into(out, [terms[rank][index] for rank in self._ranks], accumulate)
            for arrival in arrivals.values():
                arrival.release()

        return Pending(works, add_in_rank_order), num_bytes

    def all_reduce(self, parts: Sequence[ReducePart], what: str) -> tuple[Pending, int]:
        """Reduce-scatter in place, then have every owner hand its sums to everyone."""
        for part in parts:
            part.out = spans_of([part], self._rank)
        reduced, num_bytes = self.reduce_scatter(parts, what)
        tag = self._reduction_tag()  # taken now: ranks reach the second half at different times
        mine = spans_of(parts, self._rank)
        theirs = {peer: spans_of(parts, peer) for peer in self._peers}
        num_bytes += len(self._peers) * sum(span.nbytes for span in mine)
        to_all = dict.fromkeys(self._peers, mine)
        return Pending([reduced], lambda: self._exchange(to_all, theirs, tag, what)), num_bytes

    def exchange(
        self, sent: Mapping[int, Tensor], num_bytes: Mapping[int, int], what: str
    ) -> tuple[Pending, dict[int, Tensor]]:
        self._moves.record_collective(what)
        received = {p: sent[p].new_empty(num_bytes[p]) for p in self._peers}
        mine, theirs = ({p: [each[p]] for p in self._peers} for each in (sent, received))
        return self._exchange(mine, theirs, self._reduction_tag(), what), received

    def quiesce(self) -> None:
        self._moves.record_collective("the wait before weights change")
        if self._arena is not None:
            self._arena.quiesce()

    def _pieces(self, parts: Sequence[GatherPart]) -> list[Tensor]:
        """Return this rank's section of each part, without padding."""
        return [part.piece[: part.chunk.real_numel(self._rank)] for part in parts]

    def _exchange(
        self,
        mine: Mapping[int, list[Tensor]],
        theirs: Mapping[int, list[Tensor]],
        tag: int,
        what: str,
    ) -> Pending:
        """Send each peer in `theirs` what `mine` has for it, and receive that peer's tensors into `theirs`.

        Receives are posted first, since a send that meets one saves a round trip.
        """
        arrivals = [self._channels[p].receive(tag, theirs[p], what, into=True) for p in theirs]
        works = [work for p in theirs for work in self._channels[p].send(tag, mine[p], what)]

        def arrive() -> None:
            for arrival in arrivals:
                arrival.wait()
                arrival.release()

        return Pending(works, arrive)

    def _gather_tag(self, exposure: int) -> int:
        """Return a tag that depends on the exposure, see [Note: two counts].

        Ranks that gather different exposures therefore wait for each other, and never receive the wrong unit.
        """
        self._num_gathers[exposure] = time = self._num_gathers.get(exposure, 0) + 1
        return self._first_tag + 2 * (exposure * GATHERS_APART + time % GATHERS_APART)

    def _reduction_tag(self) -> int:
        self._num_reductions += 1
        return self._first_tag + 2 * self._num_reductions % NUM_TAGS + 1


def _cast_term(term: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    """Return a term in the dtype of its sum: in the sum's own memory where that holds nothing yet."""
    if term.dtype is out.dtype:
        return term
    return term.to(out.dtype) if accumulate else out.copy_(term)


def sum_into(out: Tensor, terms: Sequence[Tensor], accumulate: bool) -> None:
    """Compute out (+)= ((terms[0] + terms[1]) + terms[2]) + ...

    `out` may be one of the terms; the other terms are not written.
    """
    total = terms[0]
    own = next((i for i, term in enumerate(terms) if begin_alike(term, out)), -1)
    scratch: Tensor | None = None
    for index, term in enumerate(terms[1:], 1):
        if accumulate or index < own:  # a later addition still needs the value in `out`
            scratch = total = torch.add(total, term, out=scratch)
        else:
            total = torch.add(total, term, out=out)
    if accumulate:
        out.add_(total)
    elif not begin_alike(total, out):
        out.copy_(total)
