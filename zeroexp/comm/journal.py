"""The journal ends waits of ranks that issued different collectives, with an error that names ranks and units.

The backend pairs collectives by the order in which they are issued. A rank that skips one waits in the next for a peer
that waits in another, and the backend reports this after minutes, or never. So every rank numbers the collectives it
issues and remembers the last ones in words. When a rank has issued nothing for some seconds, a thread writes them to
the store of the process group and reads those of another. If two ranks issued different collectives under one
number, they can never meet, however slow a rank is. A rank that is merely slow never causes an error.

[Note: few requests] One process serves the store, and all ranks may be idle at once (validation, a save, a debugger).
So a look costs a few short requests, however many ranks there are. A rank compares itself with one peer at a time, at a
distance of 1, 2, 4, ... by turns: where ranks differ, some neighbours differ. It reads the words of a peer whose
checksum is another only, and who finds a difference writes it where every rank looks.

[Note: ending a wait] A wait for gloo is cut into short waits, between which the error can be raised. A wait for a GPU
can not be cut: there the thread prints the error and aborts the process group.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
import weakref
import zlib
from collections import deque
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from zeroexp.process import world as worlds
from zeroexp.process.world import World

PATIENCE_SECONDS = 3.0
LOOK_SECONDS = 1.0
NUM_REMEMBERED = 256


class Journal:
    """The collectives that one engine of this rank has issued."""

    def __init__(self, world: World):
        self.checksum = 0
        self.last: deque[tuple[int, str]] = deque(maxlen=NUM_REMEMBERED)  # (number, what)
        self.state = ""  # number and checksum of the last collective
        self.error: str | None = None
        self.changed = time.monotonic()  # when the last collective was issued
        self._world = world
        self._num_issued = 0
        self._watches = world.size > 1 and not world.is_fake
        self._cuts_waits = world.backend == "gloo"

    def start(self) -> None:
        """Agree with the other ranks on a name for this engine's journals, and start the thread."""
        if self._watches:
            name = worlds.gather_objects(uuid.uuid4().hex)[0]
            looker = ComparingThread(weakref.ref(self), self._world, name)
            run = partial(looker.run, weakref.ref(_group()))
            threading.Thread(target=run, name="zeroexp-journal", daemon=True).start()

    def record_collective(self, what: str) -> None:
        """Record the collective that this rank is about to issue. Raises RuntimeError if the ranks differ already."""
        if self.error is not None:
            raise RuntimeError(self.error)
        self.checksum = zlib.crc32(what.encode(), self.checksum)
        self._num_issued += 1
        self.last.append((self._num_issued, what))
        self.state = f"{self._num_issued} {self.checksum}"
        self.changed = time.monotonic()

    def watched(self, work: Any) -> Any:
        return CutWait(work, self) if self._watches and self._cuts_waits else work

    @property
    def seconds_to_compare(self) -> float:
        """Seconds after which this rank has been compared with peers at every distance."""
        return PATIENCE_SECONDS + (2 + _num_distances(self._world.size)) * LOOK_SECONDS

    def raise_difference(self, error: str, group: dist.ProcessGroup) -> None:
        """Report that the ranks differ, see [Note: ending a wait]."""
        self.error = error
        if not self._cuts_waits:
            print(error, file=sys.stderr, flush=True)
            group.abort()


class CutWait:
    """A work of gloo whose wait ends when the ranks are found to differ."""

    def __init__(self, work: Any, journal: Journal):
        self._work = work
        self._journal = journal

    def wait(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self._work.wait(timedelta(seconds=LOOK_SECONDS))
                return
            except RuntimeError as error:
                # An error that comes at once is no time-out: the collective failed. If the ranks differ, that is the
                # cause, so the thread gets time to find it first.
                failed = time.monotonic() - began < LOOK_SECONDS / 2
                if failed:
                    self._await_verdict()
                if self._journal.error is not None:
                    raise RuntimeError(self._journal.error) from error
                if failed:
                    raise

    def _await_verdict(self) -> None:
        until = time.monotonic() + self._journal.seconds_to_compare
        while self._journal.error is None and time.monotonic() < until:
            time.sleep(LOOK_SECONDS / 10)


class ComparingThread:
    """The work of the thread, which ends with the engine or with the process group."""

    def __init__(self, journal: weakref.ref[Journal], world: World, name: str):
        self._journal = journal
        self._rank = world.rank
        self._size = world.size
        self._name = name
        self._looks = 0
        self._shown = ""  # the state that this rank wrote last to the store

    def run(self, its_group: weakref.ref[dist.ProcessGroup]) -> None:
        while (journal := self._journal()) is not None and journal.error is None:
            group = its_group()
            if group is None or dist.group.WORLD is not group:
                return
            if time.monotonic() - journal.changed > PATIENCE_SECONDS:
                error = self.look(journal, group.get_group_store())
                if error is not None:
                    journal.raise_difference(error, group)
            del journal, group
            time.sleep(LOOK_SECONDS)

    def look(self, journal: Journal, store: Any) -> str | None:
        """Return how ranks differ, where this rank or another has found it, see [Note: few requests]."""
        state = journal.state
        if not state:
            return None
        words = list(journal.last)  # a copy: another thread may issue more meanwhile
        if self._shown != state:
            self._shown = state
            store.set(f"{self._name}/{self._rank}/words", json.dumps(words))
            store.set(f"{self._name}/{self._rank}", state)
        found = f"{self._name}/difference"
        if store.check([found]):
            return store.get(found).decode()
        peer = (self._rank + (1 << self._looks % _num_distances(self._size))) % self._size
        self._looks += 1
        key = f"{self._name}/{peer}"
        if not store.check([key]) or store.get(key).decode() == state:
            return None
        theirs = dict(json.loads(store.get(f"{key}/words")))
        error = describe_difference(self._rank, dict(words), peer, theirs)
        if error is not None:
            store.set(found, error)
        return error


def _num_distances(size: int) -> int:
    """Return how many powers of two are less than the number of ranks."""
    return (size - 1).bit_length()


def describe_difference(
    rank: int, mine: dict[int, str], peer: int, theirs: dict[int, str]
) -> str | None:
    """Describe the first number under which the two ranks issued different collectives.

    Returns None if they agree on every number that both remember.
    """
    for number in sorted(mine.keys() & theirs.keys()):
        if mine[number] != theirs[number]:
            pairs = sorted([(rank, mine[number]), (peer, theirs[number])])
            did = "; ".join(f"rank {each} is in {words}" for each, words in pairs)
            return (
                f"the ranks do not do the same, {did}. "
                "Every rank must use the same units in the same order, or use zero2"
            )
    return None


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD
