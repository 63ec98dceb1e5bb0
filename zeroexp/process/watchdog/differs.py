"""Ranks that differ: a wait for a move that can never come ends with an error that names ranks and units.

The backend pairs collectives by the order in which they are issued, and messages by the unit that they carry. A rank
that does something else waits for peers that wait for something else, and the backend says so after minutes, and names
neither peer nor move. So every rank remembers its last moves in words. While it does not advance (progress.py), a
thread looks once a second into the store of the process group: rank 0 shows its own there, and the others compare.

    rank 0 ── its last moves, their number and checksum ──▶ store ──▶ every other rank
                                    the first verdict  ◀──▶ store ──▶ every rank

Two ranks that issued different moves under one number can never meet. That is never true of a rank that is merely slow.
Gathers from memory that ranks share need no counterpart, and are not compared.

[Note: few requests] One process serves the store, and all ranks may be idle at once (validation, a save, a debugger). A
look costs every rank two short requests. The words are read by ranks whose checksum is another one, once.

[Note: ending a wait] A thread in a wait for gloo can not be interrupted, and gloo's `abort` wakes nobody. But a
receive that runs out of time closes all connections of its rank, upon which all waits there fail. A wait for a GPU
can not fail so: there the thread prints the error and aborts all process groups, since a rank may wait in any of them.
A wait for memory that ranks share looks for the error itself (comm/wake_up.py).
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
from collections.abc import Sequence
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
# From a rank's last move until it knows the verdict: rank 0 shows its own, another rank compares, all are told.
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
        self._thread: ComparingThread | None = None

    def start(self, name: str) -> None:
        """Let ranks compare their moves. All ranks call it together, with a name that no other engine has."""
        if self.world.size > 1 and not self.world.is_fake:
            group = dist.group.WORLD
            assert group is not None
            self._thread = ComparingThread(self, name, group)
            run = partial(self._thread.run, weakref.ref(self))
            threading.Thread(target=run, name="zeroexp-watchdog", daemon=True).start()

    def record_collective(self, what: str) -> None:
        """Record the collective that this rank is about to issue. Raises RuntimeError if the ranks differ already."""
        if self.error is not None:
            raise RuntimeError(self.error)
        self.checksum = zlib.crc32(what.encode(), self.checksum)
        self.num_collectives += 1
        self.collectives.append((self.num_collectives, sys.intern(what)))

    def await_verdict(self, *, is_message: bool) -> str | None:
        """Return how the ranks differ after a wait failed; None if they do not.

        A collective can fail at once since the ranks differ, so the thread gets time to find it. A wait for a message
        fails for that reason only after the verdict.
        """
        if is_message:
            return self.error or (self._thread.read_verdict() if self._thread else None)
        until = time.monotonic() + PATIENCE_SECONDS + LOOKS_TO_TELL * LOOK_SECONDS
        while self.error is None and time.monotonic() < until:
            time.sleep(LOOK_SECONDS / 10)
        return self.error


class ComparingThread:
    """The work of the thread, which ends with the engine or with the process group."""

    def __init__(self, moves: Moves, name: str, group: dist.ProcessGroup) -> None:
        self._world, self._group = moves.world, weakref.ref(group)
        self._did, self._words, self._verdict = (
            f"{name}/{key}" for key in ("did", "words", "told")
        )
        self._seen: tuple[str, list[tuple[int, str]]] = ("", [])  # of rank 0: what it did, in words
        if self._world.rank == 0:
            self._show(moves, group.get_group_store())
        else:
            group.get_group_store().wait([self._did])  # it is there whenever this rank looks

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
        """Show what this rank did, or compare it, and return how ranks differ, see [Note: few requests]."""
        if self._world.rank == 0:
            self._show(moves, store)
        elif (did := store.get(self._did).decode()) != _did(moves):
            if did != self._seen[0]:
                self._seen = did, json.loads(store.get(self._words))
            if text := describe_difference(
                self._seen[1], list(moves.collectives), self._world.rank
            ):
                store.compare_set(self._verdict, "", text)  # the first rank's counts
        return self._read_verdict(store)

    def read_verdict(self) -> str | None:
        group = self._group()
        with suppress(RuntimeError):
            return self._read_verdict(group.get_group_store()) if group is not None else None

    def _read_verdict(self, store: Any) -> str | None:
        return store.get(self._verdict).decode() if store.check([self._verdict]) else None

    def _show(self, moves: Moves, store: Any) -> None:
        did = _did(moves)
        if did != self._seen[0]:  # the words first, which are read after it
            self._seen = did, list(moves.collectives)
            store.set(self._words, json.dumps(self._seen[1]))
            store.set(self._did, did)

    def _end_waits(self, moves: Moves, verdict: str, group: dist.ProcessGroup) -> None:
        """End the waits of this rank, see [Note: ending a wait]. Rank 0, which may serve the store, does so last."""
        if self._world.rank == 0:
            time.sleep(2 * LOOK_SECONDS)
        moves.error = verdict
        if self._world.backend != "gloo":
            print(verdict, file=sys.stderr, flush=True)
            dist.distributed_c10d._abort_process_group()
            return
        if not moves.waits:  # the next wait begins with the error
            return
        peer = (self._world.rank + 1) % self._world.size
        # gloo has connections of their own for each network interface, and takes them by turns of the tag.
        for tag in range(len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))):
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, tag).wait(timedelta(milliseconds=1))


def _did(moves: Moves) -> str:
    return f"{moves.num_collectives} {moves.checksum}"


def describe_difference(
    of_first: Sequence[tuple[int, str]], of_other: Sequence[tuple[int, str]], rank: int
) -> str | None:
    """Describe the first number under which `rank` issued another collective than rank 0; None if there is none.

    Each gives its last collectives, as (number, what).
    """
    by_number = dict(of_first)
    for number, what in of_other:
        if (first := by_number.get(number, what)) != what:
            return f"{DIFFER}, rank 0 is in {first}; rank {rank} is in {what}. {REMEDY}"
    return None
