"""Ranks of one host wait for each other: each has a pipe from every neighbour, which writes there when it has news.

The news itself lies in shared memory (control_block.py); what is in a pipe only tells a rank to look again. So a pipe
that is full tells enough, and a rank that writes never waits, whether anybody reads or not. A pipe whose other end is
closed tells that the neighbour has left.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from zeroexp.measure.communication_overlap import meter
from zeroexp.process.watchdog.differs import Moves

LOOK_SECONDS = 1.0  # between two looks at whether ranks were found to differ, while nobody wakes it
MOST_BYTES = 4096  # that are taken from a pipe at once
Found = TypeVar("Found")


class WakeUpPipes:
    """The pipes between this rank and its neighbours."""

    def __init__(self, moves: Moves, peers: Sequence[int]):
        """An error in `moves` ends the waits. Ranks have their numbers among all."""
        self._moves = moves
        self.pipes: dict[int, int] = {}  # peer -> where this rank reads what wakes it
        self._theirs: dict[int, int] = {}
        self._peer_of: dict[int, int] = {}
        self._left: set[int] = set()
        self._poll = select.poll()  # select.select refuses file descriptors above 1023
        for peer in peers:
            pipe, other_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            os.close(other_end)  # the peer opens its own
            weakref.finalize(self, os.close, pipe)
            self.pipes[peer], self._peer_of[pipe] = pipe, peer
            self._poll.register(pipe, select.POLLIN)

    def add(self, peer: int, path: str) -> None:
        """Open the pipe that `peer` reads. All ranks have done so before one waits."""
        self._theirs[peer] = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._theirs[peer])

    def wake(self, peer: int) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # it has not read the last ones, or left
            os.write(self._theirs[peer], b".")

    def wake_all(self) -> None:
        for peer in self._theirs:
            self.wake(peer)

    def wait_for(self, find: Callable[[], Found | None], peer: int, what: str) -> Found:
        """Return what `find` finds; as long as that is None, `peer` is waited for, which brings it about.

        Raises ConnectionError if the peer has left, RuntimeError if the ranks were found to differ, and TimeoutError
        after the time limit of the world.
        """
        if (found := find()) is not None:
            return found
        began, deadline = time.perf_counter(), time.monotonic() + self._moves.world.timeout_seconds
        while (found := find()) is None:
            if peer in self._left:
                me = f"while rank {self._moves.world.rank} waited for {what}"
                raise ConnectionError(f"rank {peer} has left {me}")
            if self._moves.error:
                raise RuntimeError(self._moves.error)
            self._listen(deadline, peer, what)
        meter.blocked(peer, began)
        return found

    def _listen(self, deadline: float, peer: int, what: str) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            world = self._moves.world
            me = f"rank {world.rank} waited {world.timeout_seconds:g} s"
            raise TimeoutError(f"{me} for rank {peer}: {what}")
        for file, _ in self._poll.poll(1000 * min(remaining, LOOK_SECONDS)):
            if not os.read(file, MOST_BYTES):  # nobody can write there any more
                self._poll.unregister(file)
                self._left.add(self._peer_of[file])
