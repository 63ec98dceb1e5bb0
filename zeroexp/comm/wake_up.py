"""Ranks of one host wait for each other: each has a bell, which its neighbours ring when they have news.

The news itself lies in shared memory (offers.py); a bell only tells a rank to look again. A bell is a counter of the
kernel (eventfd), so many rings count as one, and a rank that rings never waits, whether anybody listens or not.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Mapping

from zeroexp.measure.verb_seconds import meter

LOOK_SECONDS = (
    1.0  # between two looks at whether the ranks were found to differ, while nobody rings
)


class Bell:
    """The bells of this rank and its neighbours. Nobody sends anything over the sockets; they tell who has left."""

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        timeout_seconds: float,
        find_error: Callable[[], str | None],
    ):
        """find_error: called while this rank waits; what it returns ends the wait."""
        self.file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        self._rank = rank
        self._timeout_seconds, self._find_error = timeout_seconds, find_error
        self._theirs: dict[int, int] = {}
        self._peer_of = {each.fileno(): peer for peer, each in sockets.items()}
        self._left: set[int] = set()
        self._poll = select.poll()  # select.select refuses file descriptors above 1023
        self._poll.register(self.file, select.POLLIN)
        for each in sockets.values():
            self._poll.register(each, select.POLLIN)
            weakref.finalize(self, each.close)

    def add(self, peer: int, file: int) -> None:
        """Add a neighbour's bell, which is closed together with this one."""
        self._theirs[peer] = file
        weakref.finalize(self, os.close, file)

    def ring(self, peer: int) -> None:
        os.eventfd_write(self._theirs[peer], 1)

    def wait_until(self, done: Callable[[], bool], peer: int, what: str) -> None:
        """Wait until `done()`, which `peer` brings about by what it writes.

        Raises ConnectionError if the peer has left, RuntimeError if the ranks were found to differ, and TimeoutError
        after the time limit of the world.
        """
        if done():
            return
        began, deadline = time.perf_counter(), time.monotonic() + self._timeout_seconds
        while not done():
            if peer in self._left:
                me = f"while rank {self._rank} waited for {what}"
                raise ConnectionError(f"rank {peer} has left {me}")
            if error := self._find_error():
                raise RuntimeError(error)
            self._listen(deadline, peer, what)
        meter.blocked(peer, began)

    def _listen(self, deadline: float, peer: int, what: str) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            seconds = f"{self._timeout_seconds:g} s"
            raise TimeoutError(f"rank {self._rank} waited {seconds} for rank {peer}: {what}")
        for file, _ in self._poll.poll(1000 * min(remaining, LOOK_SECONDS)):
            if file == self.file:
                os.eventfd_read(file)
            else:
                self._poll.unregister(file)
                self._left.add(self._peer_of[file])
