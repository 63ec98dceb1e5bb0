"""The moves between ranks and the bytes they send: the engine reaches the transports only through this file.

`direct` (direct.py, on CPU) uses shared memory where ranks share a host and messages elsewhere. `gloo` is the same with
messages only. `native` (native.py) uses the backend's own collectives.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from weakref import WeakSet

import torch
from torch import Tensor

from zeroexp.comm.base import GatherPart, Pending, ReducePart, Residuals, Sent, Transport
from zeroexp.comm.bus import Bus
from zeroexp.comm.codec import (
    decode_gathered,
    empty_codes,
    encode_pieces,
    encoded_part,
    new_error_feedback,
    reduce_scatter_encoded,
)
from zeroexp.comm.direct import Direct
from zeroexp.comm.native import Native
from zeroexp.comm.replicas import BetweenReplicas, common_traits
from zeroexp.comm.secondary import Node, SecondaryCopy
from zeroexp.comm.traits import MoveOptions, TransportTraits
from zeroexp.cut.chunk import Chunk
from zeroexp.cut.rank_grid import RankGrid
from zeroexp.measure.communication_overlap import TimedMove, meter
from zeroexp.measure.record import Traffic, sum_of_traffic
from zeroexp.process import progress
from zeroexp.process import world as worlds
from zeroexp.process.watchdog.differs import DIFFER, REMEDY, Moves
from zeroexp.process.world import World


def _on_cpu(name: str, world: World, moves: Moves) -> Transport:
    """Return a new transport of this name on CPU, and `native` elsewhere: gloo may also carry what lies on a GPU."""
    is_on_cpu = world.backend == "gloo" and world.device.type == "cpu"
    return TRANSPORTS[name if is_on_cpu else "native"](world, moves)


# Another transport is a file beside this one and a row here. It carries the moves of the ranks in `world`, all or a
# group of them, and records them in `moves`, which all transports of an engine share.
TRANSPORTS: dict[str, Callable[[World, Moves], Transport]] = {
    "auto": partial(_on_cpu, "direct"),
    "messages": partial(_on_cpu, "gloo"),  # sends all that it moves
    "direct": lambda world, moves: Direct(world, moves, share_memory=True),
    "gloo": lambda world, moves: Direct(world, moves, share_memory=False),
    "native": Native,
}


def checksum_terms(number: int) -> list[float]:
    """Return the terms that a rank adds for a number below 2**32; their sums tell whether all ranks had the same one.

    N numbers are equal if and only if N times the sum of their squares is the square of their sum. Halves of 16 bits
    keep float64 exact. The first term counts the ranks that really took part.
    """
    high, low = divmod(number, 1 << 16)
    return [1.0, float(high), float(high * high), float(low), float(low * low)]


def checksums_were_equal(sums: Sequence[float]) -> bool:
    """Tell from the sums over ranks of `checksum_terms` whether all ranks had the same number."""
    ranks, high, high_squares, low, low_squares = map(int, sums)
    return ranks * high_squares == high * high and ranks * low_squares == low * low


_of_this_process: WeakSet[Collectives] = WeakSet()


def take_traffic() -> Traffic:
    """Return what all collectives of this process sent since they were last asked. Engines of torch count nothing."""
    return sum_of_traffic(each.take_traffic() for each in _of_this_process)


def held_shared_bytes() -> int:
    """Return the bytes that this process holds outside of torch's allocator, for its collectives and engines."""
    return sum(each.held_shared_bytes for each in _of_this_process)


@dataclass(frozen=True)
class Updating:
    """The ranks by which chunks are cut for their update."""

    world: World  # these, whose messages carry what they exchange
    ranks: tuple[int, ...]  # of `world`, in the order of the cuts
    number: int  # of this rank among them
    twins: World  # those that update the same as this rank


class Collectives:
    """The three moves inside of a group and the sum of a tiny tensor over ranks, counted by kind of message.

    world: all ranks. grid: their groups. group: those that shard among themselves. holders: those that hold the same
    pieces, one of each group. In one group of all ranks this one is the only holder.
    """

    def __init__(self, world: World, options: MoveOptions | None = None):
        options = options or MoveOptions()
        self.world, self.grid = world, options.grid(world.size)
        self.bus = Bus(world, self._count_over_bus, options)
        self.masters_rest, self.shares_updates = options.masters_rest, options.shares_updates
        self.group, self.holders = world.split(self.grid)
        # The ranks that take a step together.
        self.stepping = world if options.sums_each_step else self.group
        alone = replace(world, rank=0, size=1)
        in_order = tuple(range(self.group.size))
        self._in_group = Updating(self.group, in_order, self.group.rank, self.holders)
        number = self.grid.number_by_place(world.rank)
        self._over_all = Updating(world, self.grid.by_place, number, alone)
        sends = self.group.size > 1  # else nothing travels, and nothing is rounded
        self._gather_codec = options.gather_codec if sends else None
        self._reduce_codec = options.reduce_codec if sends else None
        self._feeds_back = options.error_feedback
        transport, ranks_of_node = options.transport, options.secondary_partition
        sent = (self._gather_codec, self._reduce_codec, ranks_of_node, self.bus.keeps_pieces)
        if transport == "auto" and any((*sent, self.masters_rest and sends)):
            transport = "messages"
        self._moves = Moves(world)
        self._transport = TRANSPORTS[transport](self.group, self._moves)
        if options.reductions_apart:
            self._transport.reduce_apart()
        self._between: BetweenReplicas | None = None
        if self.holders.size > 1:
            # Pieces lie in memory that a group shares, and not its holders.
            shared = self.shares_updates and transport in ("auto", "direct")
            way = "messages" if shared else transport
            other = TRANSPORTS[way](self.holders, self._moves)
            self._between = BetweenReplicas(other, self.holders.rank, self.holders.size)
        self._node: Node | None = None
        if ranks_of_node:
            node, _ = world.split(RankGrid(world.size, world.size // ranks_of_node))
            self._node = Node(node, TRANSPORTS[transport](node, self._moves))
        self._common_traits: TransportTraits | None = None
        self._exchanges: dict[Updating, Transport] = {}  # those that this transport does not carry
        self.traffic = Traffic()
        _of_this_process.add(self)

    def connect(self) -> None:
        """Find the other ranks, and let all compare their moves while one waits for another's."""
        if self._between is not None:
            self.group.join()
            self.holders.join()
        if self._node is not None:
            self._node.world.join()
        for transport in self._transports:
            transport.connect()
        if self.world.size == 1 or self.world.is_fake:
            return
        shown = worlds.gather_objects((self._transport.traits, uuid.uuid4().hex))
        self._common_traits = common_traits([traits for traits, _ in shown])
        for transport in self._transports:
            transport.gathers_together = not self.traits.moves_on_wait
        self._moves.start(shown[0][1])

    @property
    def _transports(self) -> list[Transport]:
        beside = (self._between, self._node)
        return [self._transport, *(each.transport for each in beside if each is not None)]

    def reserve(self, resting: Sequence[int], slot_bytes: int, slot_bytes_of_sums: int = 0) -> None:
        """See `Transport.reserve`. slot_bytes_of_sums: of the largest sum between replicas."""
        self._transport.reserve(resting, slot_bytes)
        if self._between is not None:
            self._between.transport.reserve([], slot_bytes_of_sums)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._transport.empty(numel, dtype, self.world.device)

    def empty_piece(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Return memory for this rank's piece of parameters that rest sharded."""
        there = self.bus.keeps_pieces and chunk.on_host
        empty = self.bus.empty if there else self.empty
        return empty(chunk.section_numel(self.group.rank), dtype)

    @property
    def traits(self) -> TransportTraits:
        """What holds for the moves inside of every group on every rank, of which one may be alone on its host."""
        return self._common_traits or self._transport.traits

    @property
    def traits_between(self) -> TransportTraits | None:
        """What holds for this rank's sums between replicas; None without replicas."""
        return self._between.transport.traits if self._between is not None else None

    @property
    def staging_bytes(self) -> int:
        return sum(transport.staging_bytes for transport in self._transports)

    @property
    def held_shared_bytes(self) -> int:
        """Bytes that this rank holds outside of torch's allocator; a complete peak includes them."""
        return sum(transport.held_shared_bytes for transport in self._transports)

    @property
    def issued_checksum(self) -> int | None:
        return self._transport.issued_checksum

    def quiesce(self) -> None:
        with meter.timing("quiesce", "parameters"):
            self.bus.settle()
            self._transport.quiesce()

    def expose(self, parts: Sequence[GatherPart], renewed: int | None = None) -> int:
        """Expose this rank's pieces of these parts, see `Transport.expose`.

        renewed: number of an earlier exposure of the same parts. Ranks make their first exposures in the same order.
        """
        return self._transport.expose(parts, renewed)

    def all_gather(
        self,
        parts: Sequence[GatherPart],
        kind: str,
        exposure: int | None = None,
        what: str = "parameters",
        *,
        exact: bool = False,
        codes: Tensor | None = None,
        secondary: SecondaryCopy | None = None,
    ) -> Pending:
        """Start sharded -> replicated. Parts without an `exposure` get one now. `exact`: without a codec.

        codes: of the pieces, see `codes_at_rest`. secondary: keeps what has arrived.
        """
        codec = None if exact else self._gather_codec
        exposure = self.expose(parts) if exposure is None else exposure
        with meter.timing(kind, what) as move:
            if codes is None:
                parts = self.bus.pieces_to_device(parts, self.group.rank)
            if codec is None:
                moved = [self._in_dtype_of_full(part) for part in parts]
            else:
                moved = [encoded_part(codec, parts, codes)]
            gathered, num_bytes = self._transport.all_gather(
                moved, exposure, f"the {kind} of {what}"
            )
            move.moves_on_wait = self.traits.moves_on_wait
            fulls = [part.full for part in moved]
            arrived = self._unpacked(gathered, codec, fulls, parts, secondary)
            return self._count("all_gather", self.group, kind, (arrived, num_bytes), move)

    def _in_dtype_of_full(self, part: GatherPart) -> GatherPart:
        """Return the part with a piece of another dtype, a master, cast into its place in the full parameters."""
        if part.piece.dtype == part.full.dtype:
            return part
        own = part.full[part.chunk.section(self.group.rank)]
        return GatherPart(part.chunk, part.full, own.copy_(part.piece))

    def codes_at_rest(self, parts: Sequence[GatherPart]) -> Tensor | None:
        """Return the codes of this rank's pieces, which are on the device; None: the pieces rest themselves."""
        if not self.masters_rest or self._gather_codec is None:
            return None
        with self.bus.at(self.bus.places[0]):
            codes = encode_pieces(self._gather_codec, parts)
        return self.bus.to_device(codes, self.world.device)

    def secondary_copy(self, parts: Sequence[GatherPart]) -> SecondaryCopy | None:
        """Make room for what this rank keeps of these parts for its node; None: all gathers go over all ranks.

        All ranks call it in one order.
        """
        if self._node is None:
            return None
        codec = self._gather_codec
        return self._node.copy_of(parts if codec is None else [encoded_part(codec, parts)])

    def gather_in_node(
        self, parts: Sequence[GatherPart], secondary: SecondaryCopy, what: str
    ) -> Pending:
        """Start sharded -> replicated between the ranks of a node, from what they have kept of these parts."""
        assert self._node is not None
        codec, name = self._gather_codec, f"the gather in the node of {what}"
        with meter.timing("secondary", what) as move:
            fulls = [part.full for part in parts] if codec is None else [empty_codes(codec, parts)]
            kept = secondary.parts(fulls)
            gathered, num_bytes = self._node.transport.all_gather(kept, secondary.exposure, name)
            arrived = self._unpacked(gathered, codec, fulls, parts)
            return self._count(
                "all_gather", self._node.world, "secondary", (arrived, num_bytes), move
            )

    @staticmethod
    def _unpacked(
        gathered: Pending,
        codec: str | None,
        fulls: Sequence[Tensor],
        parts: Sequence[GatherPart],
        secondary: SecondaryCopy | None = None,
    ) -> Pending:
        """Return the gather that also keeps what it brings into `fulls`, and decodes it into `parts`."""
        if codec is None and secondary is None:
            return gathered

        def unpack() -> None:
            if secondary is not None:
                secondary.keep(fulls)
            if codec is not None:
                decode_gathered(codec, fulls[0], parts)

        return Pending([gathered], unpack)

    def reduce_scatter(
        self,
        parts: Sequence[ReducePart],
        kind: str,
        what: str = "gradients",
        *,
        last: bool = True,
        residuals: Residuals | None = None,
        shares: Sequence[Chunk | None] = (),
    ) -> Pending:
        """Start partial -> sharded, in native.py over NCCL, in direct.py on CPU. With replicas sums are the group's.

        residuals: see `new_error_feedback`. `last`: nothing more is added to the sums; they are those of all ranks once
        `finish_sums` has returned. Of a part with a chunk in `shares`, by which holders cut its sums, this rank's share
        alone is.
        """
        name, codec = f"the {kind} of {what}", self._reduce_codec
        nothing = parts[0].gradients[0].new_empty(0, dtype=parts[0].sent_dtype)
        with meter.timing(kind, what) as move:
            if codec is None:
                sent = self._transport.reduce_scatter(parts, name)
            else:
                sent = reduce_scatter_encoded(
                    self._transport, codec, self.group, parts, name, residuals
                )
            reduced = self._count("reduce_scatter", self.group, kind, sent, move)
        if not self._sums_between_each_step or not last:
            return reduced
        alike, apart = list[Tensor](), list[Tensor]()
        for part, share in zip_longest(parts, shares):
            (alike if share is None else apart).extend(part.sums() or [nothing])

        def sum_between() -> None:
            if alike:
                self.sum_between(alike, what)
            if apart:
                self.sum_between(apart, what, [share for share in shares if share is not None])

        return Pending([reduced], sum_between)

    @property
    def sums_each_step(self) -> bool:
        """Whether all ranks take one step together, or replicas steps of their own (outer.py)."""
        return self.stepping is self.world

    @property
    def _sums_between_each_step(self) -> bool:
        return self._between is not None and self.sums_each_step

    def sum_between(self, sums: Sequence[Tensor], what: str, shares: Sequence[Chunk] = ()) -> None:
        """Start to replace flat tensors by their sums over replicas, which `finish_sums` waits for."""
        assert self._between is not None
        self._between.keep(self._sum_between(sums, what, shares))

    def gather_between(self, parts: Sequence[GatherPart], what: str) -> Pending:
        """Start to bring together what the holders of these pieces have updated of them."""
        assert self._between is not None
        with meter.timing("replicas", what, apart=True) as move:
            sent = self._between.gather_shares(parts, f"the gather between replicas of {what}")
            return self._count("all_gather", self.holders, "replicas", sent, move)

    def new_error_feedback(self, chunks: Sequence[Chunk]) -> Residuals | None:
        """Make room for what rounding leaves out of the reductions of these chunks; None: nobody keeps it."""
        if self._reduce_codec is None or not self._feeds_back:
            return None
        return new_error_feedback(self.group, chunks)

    def finish_sums(self) -> None:
        """Return when the sums between replicas that were started are there."""
        if self._between is not None:
            self._between.finish()

    def all_reduce(
        self, parts: Sequence[ReducePart], kind: str, what: str = "gradients"
    ) -> Pending:
        """Start partial -> replicated; the sum over the group's ranks replaces `gradients` in place."""
        with meter.timing(kind, what) as move:
            sent = self._transport.all_reduce(parts, f"the {kind} of {what}")
            return self._count("all_reduce", self.group, kind, sent, move)

    def _sum_between(
        self, sums: Sequence[Tensor], what: str, shares: Sequence[Chunk] = ()
    ) -> Pending:
        """Start to sum this rank's sums with those of the other holders of its pieces."""
        assert self._between is not None
        with meter.timing("replicas", what) as move:
            sent = self._between.sum(sums, f"the sum between replicas of {what}", shares)
            collective = "reduce_scatter" if shares else "all_reduce"
            return self._count(collective, self.holders, "replicas", sent, move)

    def updating(self, *, over_all: bool) -> Updating:
        """Return the ranks that update chunks of which replicas have shares, or the others."""
        return self._over_all if over_all else self._in_group

    def open_exchanges(self, updating: Updating) -> None:
        """Let ranks that update exchange bytes, by messages: shared memory has slots for reductions alone."""
        needs_own = self.traits.shares_memory or updating.world is not self.group
        if needs_own and updating not in self._exchanges:
            messages = TRANSPORTS["messages"](updating.world, self._moves)
            self._exchanges[updating] = messages
            if not self.world.is_fake:
                messages.connect()

    def exchange(
        self,
        sent: Mapping[int, Tensor],
        num_bytes: Mapping[int, int],
        kind: str,
        what: str,
        updating: Updating,
    ) -> tuple[Pending, dict[int, Tensor]]:
        """Start to send bytes to each peer by its number among those that update, and to receive so many."""
        ranks, messages = updating.ranks, self._exchanges.get(updating, self._transport)
        of_ranks = {ranks[number]: each for number, each in sent.items()}
        sizes = {ranks[number]: size for number, size in num_bytes.items()}
        with meter.timing(kind, what) as move:
            pending, received = messages.exchange(of_ranks, sizes, f"the {kind} of {what}")
            arrived = {number: received[ranks[number]] for number in sent}
            sends = pending, sum(map(len, sent.values()))
            return self._count("all_to_all", updating.world, kind, sends, move), arrived

    def sum_scalar_later(self, value: Tensor, kind: str, over: World | None = None) -> Pending:
        """Start the sum of a tiny tensor over ranks; `value` holds it once the returned `Pending` was waited for.

        over: all ranks (None), or those of `stepping`.
        """
        ranks = over or self.world
        if ranks.size == 1:
            return Pending([])
        num_bytes = 2 * value.nbytes * (ranks.size - 1) // ranks.size
        with meter.timing(kind, "all ranks" if ranks is self.world else "the replica") as move:
            pending = self._transport.sum(value, f"the {kind}", ranks)
            return self._count("all_reduce", ranks, kind, (pending, num_bytes), move)

    def same_everywhere(self, thing: object, what: str = "a comparison of the ranks") -> bool:
        """Whether all ranks hold what prints the same, almost certainly; ranks that do not exist always do.

        Raises RuntimeError where another rank is in the comparison of something else.
        """
        if self.world.is_fake or self.world.size == 1:
            return True
        texts = repr(thing), what
        terms = [term for text in texts for term in checksum_terms(zlib.crc32(text.encode()))]
        sums = torch.tensor(terms, dtype=torch.float64, device=self.world.device)
        self._transport.sum(sums, what).wait()
        of_thing, of_what = sums.view(2, -1).tolist()
        if not checksums_were_equal(of_what):
            raise RuntimeError(f"{DIFFER}, this one is in {what}. {REMEDY}")
        return checksums_were_equal(of_thing)

    def take_traffic(self) -> Traffic:
        """Return what this rank sent since the last call."""
        traffic, self.traffic = self.traffic, Traffic()
        return traffic

    def _count_over_bus(self, way: str, num_bytes: int) -> None:
        if num_bytes:  # a rank may own nothing
            self.traffic.bus_bytes[way] = self.traffic.bus_bytes.get(way, 0) + num_bytes

    def _count(
        self, collective: str, ranks: World, kind: str, sent: Sent, move: TimedMove
    ) -> Pending:
        pending, num_bytes = sent
        move.collective, move.ranks = collective, ranks.numbers
        progress.count_move()
        pending.move, move.in_flight = move, True
        move.num_bytes += num_bytes
        sums, calls = self.traffic.bytes_by_kind, self.traffic.calls_by_kind
        sums[kind] = sums.get(kind, 0) + num_bytes
        calls[kind] = calls.get(kind, 0) + 1
        return pending
