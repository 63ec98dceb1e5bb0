"""Seconds that each verb of the engine costs a rank: it works, they overlap compute, or they are exposed.

    issue        ######                                   working
    in flight          .....................              overlapped: the rank computes meanwhile
    wait                                    ====####      exposed (====: nothing to do but wait), then working (####)

Working is packing, copying and summing in the rank's own thread. While that packs or waits for one move, another one in
flight overlaps nothing, and what two in flight share counts once. A gather over shared memory moves nothing before it
is waited for, so nothing of it overlaps. Where `recording` names a GPU the marks are events in the stream: exposed is
how long the stream stands still for the move, and work that the host does to issue it is not counted.

One meter serves the whole process, because engine, transports and training loop send messages and none of them knows
the others. It costs a few readings of the clock for each move and is always on; moves that have ended are kept only
inside `recording`, and nobody else pays for events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from zeroexp.measure.clock import Mark, mark_now, seconds_between
from zeroexp.measure.record import ALL_RANKS, VerbSeconds
from zeroexp.measure.time_spans import Interval, count_once

HOST = torch.device("cpu")


@dataclass(slots=True)
class TimedMove:
    """One move of one unit, bucket or small message, with the marks of its life."""

    verb: str
    what: str
    device: torch.device  # whose clock makes all of its marks
    began_at: Mark
    issued: Mark | None = None
    waited: Mark | None = None  # somebody began to wait for it
    arrived: Mark | None = None  # the backend's part is done
    ended_at: Mark | None = None
    in_flight: bool = False  # a Pending will end it
    moves_on_wait: bool = False
    num_bytes: int = 0  # that this rank sends
    collective: str = ""  # all_gather | reduce_scatter | all_reduce | all_to_all
    ranks: Sequence[int] = ()  # between which it is
    # (peer or None, when, seconds) of each time this rank had to wait, on the CPU
    blocked: list[tuple[int | None, float, float]] = field(
        default_factory=list[tuple[int | None, float, float]]
    )


class VerbMeter:
    """Times the moves of this process, and keeps those that end inside `recording`."""

    def __init__(self) -> None:
        self._device = HOST  # of moves that begin now
        # What a profiler is to show around each verb; it is given the verb and its object.
        self.annotate: Callable[[str], AbstractContextManager[Any]] | None = None
        # Told of each move when it has been issued, and again when it is about to be waited for.
        self.observe: Callable[[TimedMove], None] | None = None
        self._now: TimedMove | None = None  # the move that this thread issues or waits for
        self._ended: list[TimedMove] | None = None  # None: nobody records

    @contextmanager
    def timing(self, verb: str, what: str, *, apart: bool = False) -> Generator[TimedMove]:
        """Time the issue of a move. Inside another issue it is a part of that one, which is then yielded.

        apart: it is not, since it is waited for in there.
        """
        if self._now is not None and self._now.issued is None and not apart:
            yield self._now
            return
        move = TimedMove(verb, what, self._device, mark_now(self._device))
        before, self._now = self._now, move
        try:
            with self._profiler_range(move, "issue"):
                yield move
        finally:
            self._now = before
            move.issued = mark_now(move.device)
        if self.observe is not None:
            self.observe(move)
        if not move.in_flight:
            self._keep(move)

    @property
    def is_issuing(self) -> bool:
        return self._now is not None and self._now.issued is None

    @property
    def is_moving(self) -> bool:
        """Whether this thread issues a move now, or waits for one."""
        return self._now is not None

    @contextmanager
    def waiting(self, move: TimedMove) -> Generator[None]:
        move.waited = mark_now(move.device)
        if self.observe is not None:
            self.observe(move)
        before, self._now = self._now, move
        try:
            with self._profiler_range(move, "wait"):
                yield
        finally:
            self._now = before
            move.ended_at = mark_now(move.device)
        self._keep(move)

    def arrived(self, move: TimedMove) -> None:
        """Note that the backend's part of the move is done; on a GPU the stream stood still until then."""
        move.arrived = mark_now(move.device)

    def blocked(self, peer: int | None, since: float) -> None:
        """Note that this thread waited from `since` (time.perf_counter) until now, for `peer` or for all ranks.

        On a GPU the stream waits, and not the thread.
        """
        if self._now is not None and self._now.device.type == "cpu":
            self._now.blocked.append((peer, since, time.perf_counter() - since))

    @contextmanager
    def recording(self, device: torch.device = HOST) -> Generator[list[TimedMove]]:
        """Yield a list that fills with the moves that end inside and are timed on `device`, as all that begin inside.

        Nothing orders the marks of two clocks: of a move that began by another one, what passed until now is not known.
        """
        ended: list[TimedMove] = []
        before = self._ended, self._device
        self._ended, self._device = ended, device
        try:
            yield ended
        finally:
            self._ended, self._device = before

    def _keep(self, move: TimedMove) -> None:
        if self._ended is not None and move.device == self._device:
            self._ended.append(move)

    def _profiler_range(self, move: TimedMove, part: str) -> AbstractContextManager[Any]:
        if self.annotate is None:
            return nullcontext()
        return self.annotate(f"{move.verb} {move.what}, {part}")


meter = VerbMeter()


def sum_up_moves(moves: Sequence[TimedMove]) -> tuple[dict[str, VerbSeconds], dict[str, float]]:
    """Return (verb -> seconds, rank -> seconds that this rank waited for it) of moves by one clock.

    No moment counts twice, so that the sums over verbs are those of the unions of the moves' intervals.
    """
    verbs: dict[str, VerbSeconds] = {}
    waits: dict[str, float] = {}
    for move in moves:
        verbs.setdefault(move.verb, VerbSeconds()).count += 1
        for peer, _, seconds in move.blocked:
            rank = ALL_RANKS if peer is None else str(peer)
            waits[rank] = waits.get(rank, 0.0) + seconds
    exposed, thread, flights = _intervals(moves)
    for verb, seconds in count_once(exposed).items():
        verbs[verb].exposed = seconds
    for verb, seconds in count_once(thread, but=exposed).items():
        verbs[verb].working = seconds
    for verb, seconds in count_once(flights, but=thread).items():
        verbs[verb].overlapped = seconds
    return verbs, waits


def _intervals(
    moves: Sequence[TimedMove],
) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """Return when moves of one clock were exposed, when they had the thread or stream, and when they were in flight."""
    exposed, thread, flights = list[Interval](), list[Interval](), list[Interval]()
    for move in moves:
        origin, on_host = moves[0].began_at, move.device.type == "cpu"
        marks = (move.began_at, move.issued, move.waited, move.arrived, move.ended_at)
        began, issued, waited, arrived, ended = (
            None if mark is None else seconds_between(origin, mark) for mark in marks
        )
        if on_host:
            starts = ((seconds_between(origin, since), lasts) for _, since, lasts in move.blocked)
            exposed += [(move.verb, start, start + lasts) for start, lasts in starts]
            if began is not None and issued is not None:
                thread.append((move.verb, began, issued))
        elif waited is not None and arrived is not None:
            exposed.append((move.verb, waited, arrived))
        if waited is not None and ended is not None:
            thread.append((move.verb, waited, ended))
        if waited is not None and issued is not None and not move.moves_on_wait:
            flights.append((move.verb, issued, waited))
    return exposed, thread, flights
