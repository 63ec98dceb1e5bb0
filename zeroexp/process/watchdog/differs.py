"""Ranks that differ: a wait for a move that can never come ends with an error that names ranks and units.

The backend pairs collectives by the order in which they are issued, and messages by the unit that they carry. A rank
that does something else waits for peers that wait for something else, and the backend says so after minutes, and names
neither peer nor move. So every rank remembers its last moves in words. While it does not advance (progress.py), a
thread shows them once a second in the store of the process group, and rank 0 compares those of all ranks:

    every rank ── its last moves, their number and checksum ──▶ store ──▶ rank 0
               ◀──────────────── the verdict ─────────────────────────────

Two ranks that issued different moves under one number can never meet. That is never true of a rank that is merely slow.
Gathers from memory that ranks share need no counterpart, and are not compared.

[Note: few requests] One process serves the store, and all ranks may be idle at once (validation, a save, a debugger). A
look costs every rank two short requests, and rank 0 one more that reads a line of each rank. It reads the words of one
rank for each checksum.

[Note: ending a wait] A thread in a wait for gloo can not be interrupted, and gloo's `abort` wakes nobody. But a
receive that runs out of time closes all connections of its rank, upon which all waits there fail. A wait for a GPU
can not fail so: there the thread prints the error and aborts the process group. A wait for memory that ranks share
looks for the error itself (comm/wake_up.py).
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
from collections.abc import Mapping
from contextlib import suppress
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
DIFFER = "the ranks do not do the same"
REMEDY = (
    "Every rank must make the same calls and use the same units in the same order, or use zero2"
)
NUM_REMEMBERED = 256  # moves, by which one rank may be ahead of another


class Moves:
    """The moves that one engine of this rank has issued, and what it waits for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.checksum = self.num_collectives = 0
        # (number, what); full from the start, since what grows with the steps is a leak (measure/drift.py)
        older = ((-number, "") for number in reversed(range(NUM_REMEMBERED)))
        self.collectives: deque[tuple[int, str]] = deque(older, maxlen=NUM_REMEMBERED)
        self.waits = False
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
        self.collectives.append((self.num_collectives, sys.intern(what)))

    def watched(self, work: Any, message: str | None = None) -> WatchedWork:
        """Watch the wait for a collective, or for a message, as "rank 1: the gather of blocks.2"."""
        return WatchedWork(work, self, message)

    def await_verdict(self, message: str | None) -> str | None:
        """Return how the ranks differ after a wait failed; None if they do not.

        A collective can fail at once since the ranks differ, so the thread gets time to find it. A wait for a message
        fails for that reason only after the verdict.
        """
        if message is not None:
            return self.error or (self._thread.read_verdict() if self._thread else None)
        until = time.monotonic() + PATIENCE_SECONDS + LOOKS_TO_TELL * LOOK_SECONDS
        while self.error is None and time.monotonic() < until:
            time.sleep(LOOK_SECONDS / 10)
        return self.error


class WatchedWork:
    """A work of the backend whose wait ends when the ranks are found to differ."""

    def __init__(self, work: Any, moves: Moves, message: str | None) -> None:
        self._work, self._moves, self._message = work, moves, message

    def wait(self) -> None:
        moves, message = self._moves, self._message
        moves.waits = True
        try:
            if moves.error is None:  # else the thread has looked already who waits
                self._work.wait()
        except RuntimeError as error:
            if verdict := moves.await_verdict(message):
                raise RuntimeError(verdict) from error
            if message is None:
                raise
            waited = f"rank {moves.world.rank} waited for {message}"
            raise RuntimeError(f"{waited}: {error}") from error
        finally:
            moves.waits = False
        if moves.error is not None:
            raise RuntimeError(moves.error)


class Comparison:
    """The work of the thread, which ends with the engine or with the process group."""

    def __init__(self, moves: Moves, name: str, group: dist.ProcessGroup) -> None:
        self._world, self._name = moves.world, name
        self._keys = [f"{name}/{rank}" for rank in range(self._world.size)]
        self._group = weakref.ref(group)
        self._shown = ""  # the words that this rank showed last
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
        verdict = self._compare([each.decode() for each in store.multi_get(self._keys)], store)
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
        key = self._keys[self._world.rank]
        did = f"{moves.num_collectives} {moves.checksum}"
        words = json.dumps(
            list(moves.collectives)
        )  # a copy: another thread may issue more meanwhile
        if words != self._shown:
            self._shown = words
            store.set(f"{key}/words", words)
        store.set(key, did)

    def _compare(self, did: list[str], store: Any) -> str | None:
        """Describe how the ranks differ that did this, in rank order."""
        one_of_each = {each: rank for rank, each in reversed([*enumerate(did)])}
        if len(one_of_each) == 1:
            return None
        self._words = {
            each: self._words.get(each) or json.loads(store.get(f"{self._keys[rank]}/words"))
            for each, rank in one_of_each.items()
        }
        return describe_difference({rank: self._words[each] for each, rank in one_of_each.items()})

    def _end_waits(self, moves: Moves, verdict: str, group: dist.ProcessGroup) -> None:
        """End the waits of this rank, see [Note: ending a wait]. Rank 0, which may serve the store, does so last."""
        if self._world.rank == 0:
            time.sleep(2 * LOOK_SECONDS)
        moves.error = verdict
        if self._world.backend != "gloo":
            print(verdict, file=sys.stderr, flush=True)
            group.abort()
            return
        if not moves.waits:  # the next wait begins with the error
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
    return f"{DIFFER}, {did}. {REMEDY}"
