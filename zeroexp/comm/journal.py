"""Ends the wait of ranks that do not issue the same collectives, with an error that names ranks and units.

The backend pairs collectives by the order in which they are issued. A rank that skips one waits in the next for a peer
that waits in another, and the backend says so after minutes, or never. So every rank counts what it issues and
remembers the last words. When it has issued nothing for some seconds, a thread shows them in the store of the process
group and reads the others'. Two ranks whose collectives of one number differ will never meet: that is certain, however
slow a rank is. A rank that only is slow is accused of nothing.

[Note: ending a wait] A wait for gloo is cut in short ones, between which the error is raised. A wait for a GPU can not
be: there the error is printed, and the process group is aborted.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from zeroexp.world import World

PATIENCE_SECONDS = 3.0
LOOK_SECONDS = 1.0
NUM_REMEMBERED = 256
_journals = count()  # of this process; ranks build their engines in one order


class Journal:
    """What one engine of this rank has issued."""

    def __init__(self, world: World):
        self.checksum = 0
        self.num_issued = 0
        self.last: deque[str] = deque(maxlen=NUM_REMEMBERED)
        self.error: str | None = None
        self.changed = time.monotonic()  # when something was issued last
        self._world = world
        self._name = f"zeroexp/issued/{next(_journals)}"
        self._watches = world.size > 1 and world.backend != "fake"
        self._cuts_waits = world.backend == "gloo"
        self._started = False

    def note(self, what: str) -> None:
        """This rank is about to issue its next collective."""
        if self.error is not None:
            raise RuntimeError(self.error)
        self.checksum = zlib.crc32(what.encode(), self.checksum)
        self.num_issued += 1
        self.last.append(what)
        self.changed = time.monotonic()
        if self._watches and not self._started:
            self._started = True
            looker = Looker(weakref.ref(self), self._world, self._name)
            threading.Thread(target=looker.run, name="zeroexp-journal", daemon=True).start()

    def watched(self, work: Any) -> Any:
        return CutWait(work, self) if self._watches and self._cuts_waits else work

    def differ(self, error: str) -> None:
        """See [Note: ending a wait]."""
        self.error = error
        if not self._cuts_waits:
            print(error, file=sys.stderr, flush=True)
            group = dist.group.WORLD
            assert group is not None
            group.abort()


class CutWait:
    """A work of gloo whose wait ends when the ranks were found to differ."""

    def __init__(self, work: Any, journal: Journal):
        self._work = work
        self._journal = journal

    def wait(self) -> None:
        while True:
            try:
                self._work.wait(timedelta(seconds=LOOK_SECONDS))
                return
            except RuntimeError as error:
                if self._work.is_completed():  # it failed: peers that differ are told apart first
                    self._await_verdict()
                if self._journal.error is not None:
                    raise RuntimeError(self._journal.error) from error
                if self._work.is_completed():
                    raise

    def _await_verdict(self) -> None:
        until = time.monotonic() + PATIENCE_SECONDS + 3 * LOOK_SECONDS
        while self._journal.error is None and time.monotonic() < until:
            time.sleep(LOOK_SECONDS / 10)


class Looker:
    """What the thread does; it ends with the engine."""

    def __init__(self, journal: weakref.ref[Journal], world: World, name: str):
        self._journal = journal
        self._rank = world.rank
        self._size = world.size
        self._name = name
        self._shown = 0  # how much had been issued when it was shown last

    def run(self) -> None:
        while (journal := self._journal()) is not None and journal.error is None:
            if time.monotonic() - journal.changed > PATIENCE_SECONDS and dist.is_initialized():
                self._look(journal)
            del journal
            time.sleep(LOOK_SECONDS)

    def _look(self, journal: Journal) -> None:
        store = _store()
        first = journal.num_issued - len(journal.last) + 1
        if self._shown != journal.num_issued:
            self._shown = journal.num_issued
            words = json.dumps({"first": first, "words": list(journal.last)})
            store.set(f"{self._name}/{self._rank}", words)
        mine = dict(enumerate(journal.last, first))
        for rank in range(self._size):
            key = f"{self._name}/{rank}"
            if rank != self._rank and store.check([key]):
                told = json.loads(store.get(key))
                theirs = dict(enumerate(told["words"], told["first"]))
                error = difference(self._rank, mine, rank, theirs)
                if error is not None:
                    journal.differ(error)
                    return


def difference(rank: int, mine: dict[int, str], peer: int, theirs: dict[int, str]) -> str | None:
    """What the two ranks did at the first number at which their words differ; None if none is known to both."""
    for number in sorted(mine.keys() & theirs.keys()):
        if mine[number] != theirs[number]:
            pairs = sorted([(rank, mine[number]), (peer, theirs[number])])
            did = "; ".join(f"rank {each} is in {words}" for each, words in pairs)
            return (
                f"the ranks do not do the same, {did}. "
                "Every rank must use the same units in the same order, or use zero2"
            )
    return None


def _store() -> Any:
    group = dist.group.WORLD
    assert group is not None
    return group.get_group_store()
