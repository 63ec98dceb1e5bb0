"""Ranks that differ: a wait for a move that can never come ends with an error that names ranks and units.

The backend pairs collectives by the order in which they are issued, and messages by their tags. A rank that does
something else waits for peers that wait for something else, and the backend says so after minutes, and names neither
peer nor move. So every rank remembers its last moves in words. While it does not advance (progress.py), a thread shows
them once a second in the store of the process group, and rank 0 compares those of all ranks:

    every rank ── its collectives, their checksum, what it sent and waits for ──▶ store ──▶ rank 0
               ◀──────────────────────── the verdict ─────────────────────────────────────

Two ranks that issued different collectives under one number can never meet. Nor can ranks in a ring, in which each
waits for a message that the next has not sent. Neither is ever true of a rank that is merely slow.

[Note: few requests] One process serves the store, and all ranks may be idle at once (validation, a save, a debugger). A
look costs every rank two short requests, and rank 0 one more that reads a line of each rank. It reads the words of one
rank for each checksum, and what was sent by ranks in a ring.

[Note: both looks] The wait of a rank counts if it was shown at two looks of the same wait: what the store holds may be
of a wait that is over.

[Note: ending a wait] A thread in a wait for gloo can not be interrupted, and gloo's `abort` wakes nobody. But a
receive that runs out of time closes all connections of its rank, upon which all waits there fail. A wait for a GPU
can not fail so: there the thread prints the error and aborts the process group.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zeroexp.process import progress
from zeroexp.process.world import World

PATIENCE_SECONDS = 3.0
LOOK_SECONDS = 1.0
# From a rank's last move until it knows the verdict: it is shown, read by rank 0, and told to the others.
LOOKS_TO_TELL = 6
NUM_REMEMBERED = 256  # far more messages than may be in flight


@dataclass(frozen=True)
class Message:
    """A message between this rank and `peer`; `what` describes its content."""

    peer: int
    tag: int
    what: str


class Moves:
    """The moves that one engine of this rank has issued, and what it waits for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.checksum = self.num_collectives = 0
        self.collectives: deque[tuple[int, str]] = deque(maxlen=NUM_REMEMBERED)  # (number, what)
        self.sent: deque[tuple[int, int]] = deque(maxlen=NUM_REMEMBERED)  # (peer, tag)
        # The wait of now, for a message or for all ranks, and since when.
        self.waits: tuple[Message | None, float] | None = None
        self.error: str | None = None
        self._thread: Comparison | None = None

    def start(self, name: str) -> None:
        """Let ranks compare their moves. All ranks call it together, with a name that no other engine has."""
        if self.world.size > 1 and not self.world.is_fake:
            group = dist.group.WORLD
            assert group is not None
            self._thread = Comparison(self, name, group)
            run = partial(self._thread.run, weakref.ref(self))
            threading.Thread(target=run, name="zeroexp-watchdog", daemon=True).start()

    def record_collective(self, what: str) -> None:
        """Record the collective that this rank is about to issue. Raises RuntimeError if the ranks differ already."""
        if self.error is not None:
            raise RuntimeError(self.error)
        self.checksum = zlib.crc32(what.encode(), self.checksum)
        self.num_collectives += 1
        self.collectives.append((self.num_collectives, what))

    def record_message(self, peer: int, tag: int) -> None:
        """Record the message that this rank is about to send."""
        self.sent.append((peer, tag))

    def watched(self, work: Any, message: Message | None = None) -> WatchedWork:
        return WatchedWork(work, self, message)

    def await_verdict(self) -> str | None:
        """Return how the ranks differ after a wait failed; None if they do not.

        A collective can fail at once since the ranks differ, so the thread gets time to find it. A wait for a message
        fails for that reason only after the verdict.
        """
        if not self.collectives:
            return self.error or (self._thread.read_verdict() if self._thread else None)
        until = time.monotonic() + PATIENCE_SECONDS + LOOKS_TO_TELL * LOOK_SECONDS
        while self.error is None and time.monotonic() < until:
            time.sleep(LOOK_SECONDS / 10)
        return self.error


class WatchedWork:
    """A work of the backend whose wait ends when the ranks are found to differ."""

    def __init__(self, work: Any, moves: Moves, message: Message | None) -> None:
        self._work, self._moves, self._message = work, moves, message

    def wait(self) -> None:
        moves, message = self._moves, self._message
        moves.waits = message, time.monotonic()
        try:
            if moves.error is None:  # else the thread has looked already who waits
                self._work.wait()
        except RuntimeError as error:
            if verdict := moves.await_verdict():
                raise RuntimeError(verdict) from error
            if message is None:
                raise
            waited = f"rank {moves.world.rank} waited for rank {message.peer}: {message.what}"
            raise RuntimeError(f"{waited}: {error}") from error
        finally:
            moves.waits = None
        if moves.error is not None:
            raise RuntimeError(moves.error)


class Comparison:
    """The work of the thread, which ends with the engine or with the process group."""

    def __init__(self, moves: Moves, name: str, group: dist.ProcessGroup) -> None:
        self._world, self._name = moves.world, name
        self._keys = [f"{name}/{rank}" for rank in range(self._world.size)]
        self._group = weakref.ref(group)
        self._looks = 0
        self._shown = ""  # the words that this rank showed last
        self._seen: dict[int, Any] = {}  # rank -> what rank 0 read at the last look
        self._words: dict[str, Any] = {}  # checksum -> collectives that led to it
        self._show(moves, group.get_group_store())

    def run(self, its_moves: weakref.ref[Moves]) -> None:
        done, since = progress.done(), time.monotonic()
        with suppress(RuntimeError):  # the rank that serves the store has gone
            while (moves := its_moves()) is not None:
                group = self._group()
                if group is None or dist.group.WORLD is not group:
                    return
                if done != progress.done():
                    done, since = progress.done(), time.monotonic()
                stands = time.monotonic() - since > PATIENCE_SECONDS
                verdict = self.look(moves, group.get_group_store()) if stands else None
                if verdict is not None:
                    self._end_waits(moves, verdict, group)
                    return
                del moves, group
                time.sleep(LOOK_SECONDS)

    def look(self, moves: Moves, store: Any) -> str | None:
        """Show what this rank did, and return how ranks differ, see [Note: few requests]."""
        self._show(moves, store)
        if self._world.rank:
            return self._read_verdict(store)
        if not store.check(self._keys):  # a rank has not begun
            return None
        verdict = self._compare([json.loads(each) for each in store.multi_get(self._keys)], store)
        if verdict is not None:
            store.set(f"{self._name}/verdict", verdict)
        return verdict

    def read_verdict(self) -> str | None:
        group = self._group()
        with suppress(RuntimeError):
            return self._read_verdict(group.get_group_store()) if group is not None else None

    def _read_verdict(self, store: Any) -> str | None:
        key = f"{self._name}/verdict"
        return store.get(key).decode() if store.check([key]) else None

    def _show(self, moves: Moves, store: Any) -> None:
        key, waits = self._keys[self._world.rank], moves.waits
        line: dict[str, Any] = {"did": f"{moves.num_collectives} {moves.checksum}"}
        # These are copies: another thread may issue more meanwhile.
        words = json.dumps({"collectives": list(moves.collectives), "sent": list(moves.sent)})
        if words != self._shown:
            self._shown = words
            store.set(f"{key}/words", words)
        if waits is not None and waits[0] is not None:
            line["waits"] = asdict(waits[0]) | {"since": waits[1]}
        self._looks += 1
        store.set(key, json.dumps({**line, "look": self._looks}))

    def _compare(self, lines: list[dict[str, Any]], store: Any) -> str | None:
        """Describe how the ranks differ whose lines these are, in rank order."""

        def read(rank: int, kind: str) -> Any:
            return json.loads(store.get(f"{self._keys[rank]}/words"))[kind]

        one_of_each = {lines[rank]["did"]: rank for rank in reversed(range(len(lines)))}
        self._words = {
            did: self._words.get(did) or read(rank, "collectives")
            for did, rank in one_of_each.items()
            if len(one_of_each) > 1
        }
        words = {rank: self._words[did] for did, rank in one_of_each.items() if self._words}
        if error := describe_difference(words):
            return error
        before, self._seen = self._seen, dict(enumerate(lines))
        waits = {r: line["waits"] for r, line in self._seen.items() if _again(before.get(r), line)}
        ring = find_lost_ring(waits, lambda rank: read(rank, "sent"))
        return _describe_ring(ring, waits) if ring else None

    def _end_waits(self, moves: Moves, verdict: str, group: dist.ProcessGroup) -> None:
        """End the waits of this rank, see [Note: ending a wait]. Rank 0, which may serve the store, does so last."""
        if self._world.rank == 0:
            time.sleep(2 * LOOK_SECONDS)
        moves.error = verdict
        if self._world.backend != "gloo":
            print(verdict, file=sys.stderr, flush=True)
            group.abort()
            return
        if moves.waits is None:  # the next wait begins with the error
            return
        peer = (self._world.rank + 1) % self._world.size
        # gloo has connections of their own for each network interface, and takes them by turns of the tag.
        for tag in range(len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))):
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, tag).wait(timedelta(milliseconds=1))


def describe_difference(words: Mapping[int, list[tuple[int, str]]]) -> str | None:
    """Describe the first number under which two of these ranks issued different collectives; None if there is none.

    words: for each rank its last collectives, as (number, what).
    """
    first: dict[int, tuple[int, str]] = {}  # number -> the lowest rank that remembers it, and what
    differ: list[tuple[int, int, str]] = []
    for rank in sorted(words):
        for number, what in words[rank]:
            if first.setdefault(number, (rank, what))[1] != what:
                differ.append((number, rank, what))
    if not differ:
        return None
    number, rank, what = min(differ)
    did = f"rank {first[number][0]} is in {first[number][1]}; rank {rank} is in {what}"
    return (
        f"the ranks do not do the same, {did}. "
        "Every rank must use the same units in the same order, or use zero2"
    )


def find_lost_ring(
    waits: Mapping[int, Any], sent_by: Callable[[int], list[list[int]]]
) -> list[int]:
    """Return ranks of which each waits for the next, and the last for the first, for messages that nobody has sent.

    waits: peer and tag of the message that a rank waits for. sent_by: what a rank has sent, as [peer, tag].
    """
    seen: set[int] = set()
    for rank in waits:
        chain: list[int] = []
        while rank in waits and rank not in seen:
            seen.add(rank)
            chain.append(rank)
            rank = waits[rank]["peer"]
        ring = chain[chain.index(rank) :] if rank in chain else []
        on_its_way = ([each, waits[each]["tag"]] in sent_by(waits[each]["peer"]) for each in ring)
        if ring and not any(on_its_way):
            return ring
    return []


def _again(before: Any, line: Any) -> bool:
    """Tell whether a rank showed this wait at two looks, see [Note: both looks]."""
    if before is None or "waits" not in before or "waits" not in line:
        return False
    return before["waits"]["since"] == line["waits"]["since"] and before["look"] < line["look"]


def _describe_ring(ring: list[int], waits: Mapping[int, Any]) -> str:
    waiting = (f"rank {r} waits for rank {waits[r]['peer']}: {waits[r]['what']}" for r in ring)
    return (
        f"the ranks do not do the same, {'; '.join(waiting)}. "
        "Between hosts every rank must use the same units in the same order"
    )
