"""Moves between ranks: what each takes and returns, and what every transport can do.

[Note: parts] A move takes the parts of one unit or bucket together: they travel as one collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.comm.traits import TransportTraits
from zeroexp.cut.chunk import Chunk
from zeroexp.measure.communication_overlap import TimedMove, meter
from zeroexp.process import progress
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World


@dataclass
class GatherPart:
    """One chunk whose sections become one `full` flat tensor on every rank; `piece` is this rank's section."""

    chunk: Chunk
    full: Tensor
    piece: Tensor
    # `full` with a row for each rank; None where the chunk is cut unevenly
    by_rank: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        even, world_size = self.chunk.even, len(self.chunk.cuts) - 1
        width = self.full.numel() // world_size
        self.by_rank = self.full.view(world_size, width) if even else None


@dataclass
class ReducePart:
    """One chunk whose gradients are summed over ranks.

    gradients: one flat tensor for each member.
    dtype: in which they travel and are summed, the same for all parts of a move; None: the gradients' own.
    out: one flat tensor for each span this rank owns; it may be that very span of `gradients`. `allocate` makes them
    when a transport first asks for `sums`: what it packs from is freed before.
    accumulate: the sum is added to `out` instead of overwriting it.
    absent: members of which this rank has had no gradient in this step, whose `gradients` are zeros.
    """

    chunk: Chunk
    gradients: list[Tensor]
    out: list[Tensor] = field(default_factory=list)
    accumulate: bool = False
    absent: Sequence[int] = ()
    dtype: torch.dtype | None = None
    allocate: Callable[[], list[Tensor]] | None = None

    def sums(self) -> list[Tensor]:
        """Return `out`."""
        if self.allocate is not None:
            self.out, self.allocate = self.allocate(), None
        return self.out

    @property
    def sent_dtype(self) -> torch.dtype:
        return self.dtype or self.gradients[0].dtype


def spans_of(parts: Sequence[ReducePart], owner: int) -> list[Tensor]:
    """Return views of the gradients that `owner` sums, which are cast as they travel (`ReducePart.sent_dtype`)."""
    return [
        part.gradients[span.member][span.start : span.stop]
        for part in parts
        for span in part.chunk.spans(owner)
    ]


class Pending:
    """A move in flight. When `wait` returns, its results are in the tensors that the caller named."""

    def __init__(self, works: Sequence[Any], then: Callable[[], Pending | None] | None = None):
        self._works = works
        self._then = then
        self.move: TimedMove | None = None  # the move that the wait is timed as

    def wait(self) -> None:
        progress.count_move()
        move, self.move = self.move, None
        with nullcontext() if move is None else meter.waiting(move):
            for work in self._works:
                work.wait()
            if move is not None:
                meter.arrived(move)
            then, self._works, self._then = self._then, (), None
            follow = then() if then is not None else None
            if follow is not None:
                follow.wait()


class WatchedWork:
    """A work of the backend, whose wait ends when the ranks are found to differ (process/watchdog/differs.py).

    It is time that this rank waits for `peer`, whose message `what` it is, or in a collective (None) for all others.
    Works of NCCL and gloo hold what they send until they are waited for, and here those of a group that moves nothing,
    by which a rehearsal sees these bytes.
    """

    def __init__(
        self,
        work: Any,
        moves: Moves,
        held: Sequence[Tensor] = (),
        *,
        peer: int | None = None,
        what: str = "",
    ):
        self._work, self._moves, self._held = work, moves, held
        self._peer, self._what = peer, what

    def wait(self) -> None:
        moves, peer = self._moves, self._peer
        began, moves.waits = time.perf_counter(), True
        try:
            if moves.error is None:  # else the thread has looked already who waits
                self._work.wait()
        except RuntimeError as error:
            if verdict := moves.await_verdict(is_message=peer is not None):
                raise RuntimeError(verdict) from error
            if peer is None:
                raise
            waited = f"rank {moves.world.rank} waited for rank {peer}: {self._what}"
            raise RuntimeError(f"{waited}: {error}") from error
        finally:
            moves.waits = False
        if moves.error is not None:
            raise RuntimeError(moves.error)
        self._held = ()
        meter.blocked(peer, began)


# What rounding left out of the terms sent to each peer, flat float32 (codec.py).
Residuals = dict[int, Tensor]
Sent = tuple[Pending, int]  # a move in flight, and the bytes this rank sends


class Transport:
    """One way to carry the moves between the ranks of a world. Errors name the move by `what`.

    What is not abstract here is what a transport does that reads any memory, and sends from it when it is asked to.
    """

    # What the engine needs to know; final after `connect`, which tells which ranks are on other hosts.
    traits: TransportTraits
    staging_bytes = 0  # of shared memory for gradients on their way to neighbours
    held_shared_bytes = 0  # of all memory that neighbours map; torch's allocator does not count it
    # Whether all ranks issue the same gathers, also those that share memory with all of their peers.
    gathers_together = False

    def __init__(self, world: World, moves: Moves):
        self._world, self._moves = world, moves

    @property
    def issued_checksum(self) -> int | None:
        """A checksum below 2**32 of the collectives issued so far; None where ranks may issue different gathers."""
        return None

    def reduce_apart(self) -> None:
        """Let reductions have a communicator of their own, so that no gather waits for one. Comes before `connect`."""
        raise ValueError(
            f"reductions_apart=True: over {self.traits.name} no move waits for another; use False"
        )

    def connect(self) -> None:
        """Find the other ranks. All ranks call it once."""

    def reserve(self, resting: Sequence[int], slot_bytes: int) -> None:
        """Announce, once, the bytes of each tensor that `empty` will be asked for, and of the largest reduction."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate parameters at rest where peers can read them best."""
        return torch.empty(numel, dtype=dtype, device=device)

    def expose(self, parts: Sequence[GatherPart], renewed: int | None) -> int:
        """Promise that this rank's pieces of these parts will not change before `quiesce`.

        Returns the number by which `all_gather` knows the exposure. A `renewed` exposure keeps its number.
        """
        return 0

    # The moves, in native.py over NCCL and in direct.py on CPU.

    def all_gather(self, parts: Sequence[GatherPart], exposure: int, what: str) -> Sent:
        raise NotImplementedError

    def reduce_scatter(self, parts: Sequence[ReducePart], what: str) -> Sent:
        raise NotImplementedError

    def all_reduce(self, parts: Sequence[ReducePart], what: str) -> Sent:
        """Replace gradients by their sums, in place."""
        raise NotImplementedError

    def exchange(
        self, sent: Mapping[int, Tensor], num_bytes: Mapping[int, int], what: str
    ) -> tuple[Pending, dict[int, Tensor]]:
        """Send bytes to each peer, and return the tensors in which so many bytes of each peer will be."""
        raise NotImplementedError

    def sum(self, value: Tensor, what: str, world: World | None = None) -> Pending:
        """Replace a tiny tensor by its sum over the ranks of `world`; None: all ranks, those of other groups too."""
        self._moves.record_collective(what)
        group = (world or self._moves.world).process_group
        work = dist.all_reduce(value, group=group, async_op=True)
        return Pending([WatchedWork(work, self._moves)])

    def quiesce(self) -> None:
        """Return when every peer has read what was exposed, so that it may be overwritten."""


def part_of(flat: Tensor, start: int, stop: int) -> Tensor:
    """Return these elements; where they are all of the tensor return it itself, since a view costs an operation."""
    return flat if (start, stop) == (0, flat.numel()) else flat[start:stop]
