"""Tasks that are lost: a crashed node sends nothing, and its peers would wait.

    task of rank 0  ◀── one connection each ──▶  tasks of ranks 1 .. N-1      (who is a task: connection.py)

Both ends send a beat three times per period and expect one within it. A task that ends for any reason says goodbye
first, so a connection that closes without a goodbye is a loss too. The ranks take no part in this: they may compute for
minutes. A beat carries how the task sees its rank, from which the task of rank 0 tells that ranks hang (hung.py).

A task that has not met its peers one period after the time that a job has to start misses them.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import Any

from zeroexp.process import ports
from zeroexp.process.watchdog.connection import BEAT, BYE, Connection, Stranger
from zeroexp.process.watchdog.hung import HUNG, Sight, WatchedRank, find_hang

BEATS_PER_PERIOD = 3
SECONDS_BETWEEN_CALLS = 1.0  # to the task of rank 0, until it listens; at most from beat to beat
CALL_SECONDS = 5.0  # for a call, and for an introduction
NO_PORT = 0  # what the task of rank 0 publishes where it can not listen


@dataclass
class HeartbeatAddress:
    """Where the task of rank 0 listens to heartbeats, with what those who call it must know."""

    host: str
    file: Path  # in which it publishes its port
    secret: bytes
    ports: str | None = None  # the range that it may choose from
    port: int | None = None  # None: not published so far

    def __str__(self) -> str:
        return f"port {self.port} of {self.host}" if self.port else self.host


class Heartbeat:
    """The heartbeat of one task, whose rank is `child`; `hub` says where the task of rank 0 listens.

    It is a context manager, and leaving it says goodbye. start_seconds: from a job's first task to its last.
    hang_seconds: of `cluster.hang_s`; None: a rank that hangs is not looked for. name_of: the name of a rank that never
    connected and so never sent its own.
    """

    def __init__(
        self,
        child: WatchedRank,
        world_size: int,
        hub: HeartbeatAddress,
        period_seconds: float,
        *,
        start_seconds: float,
        hang_seconds: float | None = None,
        name_of: Callable[[int], str] = "rank {}".format,
    ) -> None:
        rank = child.rank
        self.hangs = False  # the ranks do
        self.guilty: tuple[int, str, str] | None = None  # of find_hang, in the task of rank 0
        self.sights: list[Sight] = []  # of the rank, when it was seen last
        self._child, self._world_size, self._hang_seconds = child, world_size, hang_seconds
        self._me, self._hub = f"rank {rank} on {socket.gethostname()}", hub
        self._period, self._start, self._name_of = period_seconds, start_seconds, name_of
        self._missing = set(range(1, world_size)) if rank == 0 else {0}
        self._connections: dict[socket.socket, Connection] = {}
        self._selector = DefaultSelector()
        self._listener: socket.socket | None = None
        self._calls = rank != 0
        self._next_beat = self._next_call = 0.0
        self._looked = monotonic()  # the last look at the peers' silence
        # After this time no task may be missing.
        self._all_by = self._looked + self._start + self._period
        if rank == 0 and world_size > 1:
            self._listen(world_size)

    def wait(self, until: Callable[[], str | None] = lambda: None) -> str | None:
        """Wait until the rank has ended (None), a peer is lost, the ranks hang, or `until` returns a message.

        `until` is called at every beat. Slurm ends the rest of a job that lost a task, so the rank's end may be the
        consequence of a loss: a last look at the peers shows this.
        """
        child = self._child
        self._selector.register(child, EVENT_READ)
        try:
            while True:
                due = self._next_call if self._calls else self._next_beat
                ready = self._ready(max(0.0, due - monotonic()))
                if child in ready:
                    return self._hear(self._ready(0))
                if words := self._hear(ready) or self._silent() or self._never_came():
                    return words
                if self._speak() and (words := until() or self._hang()):
                    return words
        finally:
            self._selector.unregister(child)

    def _hang(self) -> str | None:
        """Return a message once the ranks hang, which the task of rank 0 finds: it alone hears all others."""
        reports = [peer.report for peer in self._peers() if peer.report]
        self.hangs = HUNG in reports
        hears_all = self._child.rank == 0 and len(reports) == self._world_size - 1
        if self._hang_seconds is not None and hears_all:
            sights = [*self.sights, *map(Sight.read, reports)]
            self.guilty = find_hang(sights, self._hang_seconds)
            if self.guilty:
                self.hangs = True
                self._tell()
        return HUNG if self.hangs else None

    def _tell(self) -> None:
        """Send a beat that says of the rank how it was seen, or the verdict."""
        report = HUNG if self.hangs else ""
        if self._hang_seconds is not None and not self.hangs:
            self.sights = [self._child.look(self._period / BEATS_PER_PERIOD)]
            report = self.sights[0].line()
        for peer in self._peers():
            peer.send(f"{BEAT}{report}")

    def wait_for_goodbyes(self, seconds: float) -> None:
        """Wait until every task that ever came has left, at most for so long."""
        deadline = monotonic() + seconds
        while not all(peer.left for peer in self._peers()):
            if (left := deadline - monotonic()) <= 0:
                return
            if self._hear(self._ready(left)):
                return

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers():
            peer.send(BYE)
        for each in self._connections:
            each.close()
        if self._listener:
            self._listener.close()
        self._selector.close()

    def _peers(self) -> Iterator[Connection]:
        """Tasks that ever came, also those that have left."""
        return (each for each in self._connections.values() if each.name)

    def _listen(self, world_size: int) -> None:
        try:
            self._listener = ports.listen_on_free_port(
                self._hub.host, self._hub.ports, backlog=world_size
            )
            self._listener.setblocking(False)
            self._hub.port = port = self._listener.getsockname()[1]
            ports.publish_port(self._hub.file, port)
        except OSError as error:  # the job can run without its heartbeat
            print(f"no heartbeat between tasks: {error}", file=sys.stderr)
            self._missing.clear()
            with suppress(OSError):
                ports.publish_port(self._hub.file, NO_PORT)
            return
        self._selector.register(self._listener, EVENT_READ)

    def _ready(self, seconds: float) -> list[Any]:
        return [key.fileobj for key, _ in self._selector.select(seconds)]

    def _hear(self, ready: Sequence[Any]) -> str | None:
        """Read all that has arrived; return a message if a peer hung up without a goodbye."""
        for each in ready:
            if each is self._listener:
                self._answer()
            elif each in self._connections and (lost := self._read(each)):
                return lost
        return None

    def _read(self, connection: socket.socket) -> str | None:
        peer = self._connections[connection]
        try:
            goes_on = peer.read(monotonic())
        except Stranger:
            self._put_down(connection)
            return None
        if peer.rank is not None:
            self._missing.discard(peer.rank)
        if goes_on:
            return None
        self._selector.unregister(connection)
        return None if peer.left else f"{peer.name} is gone: its connection closed without a word"

    def _silent(self) -> str | None:
        now = monotonic()
        if now - self._looked > self._period / 2:  # this task itself was stopped or short of CPU
            self._all_by += now - self._looked
            for peer in self._peers():
                peer.heard = now
        self._looked = now
        for each, other in list(self._connections.items()):
            if not other.name and now - other.heard > CALL_SECONDS:
                self._put_down(each)
        for peer in self._peers():
            if not peer.left and now - peer.heard > self._period:
                return f"{peer.name} is gone: no sign of it for {self._period:.0f} s (cluster.heartbeat_s)"
        return None

    def _never_came(self) -> str | None:
        if not self._missing or monotonic() < self._all_by:
            return None
        first, *others = sorted(self._missing)
        nor = f", nor did {len(others)} more" if others else ""
        how = "answer from" if 0 in self._missing else "reach"
        return (
            f"{self._name_of(first)} is gone: it did not {how} {self._hub} "
            f"within {self._start:.0f} s + cluster.heartbeat_s={self._period:.0f}{nor}"
        )

    def _speak(self) -> bool:
        """Call and send beats when they are due; return True if it was time for a beat."""
        now = monotonic()
        if self._calls and now >= self._next_call:
            self._call()
            self._next_call = now + min(SECONDS_BETWEEN_CALLS, self._period / BEATS_PER_PERIOD)
        if now < self._next_beat:
            return False
        self._tell()
        self._next_beat = now + self._period / BEATS_PER_PERIOD
        return True

    def _call(self) -> None:
        """Connect to the task of rank 0, which may not have started yet."""
        port = self._hub.port = ports.read_published_port(self._hub.file)
        if port is None:
            return
        if port == NO_PORT:
            self._missing.clear()
            self._calls = False
            return
        with suppress(OSError):
            self._meet(socket.create_connection((self._hub.host, port), timeout=CALL_SECONDS))
            self._calls = False
        self._looked = monotonic()  # this task was busy, not asleep

    def _answer(self) -> None:
        """Accept a connection, which may have gone already."""
        assert self._listener is not None
        with suppress(OSError):
            self._meet(self._listener.accept()[0])

    def _meet(self, connection: socket.socket) -> None:
        """Begin to exchange names; nobody waits for the other end to go on."""
        self._connections[connection] = Connection(
            connection, self._me, self._hub.secret, self._missing.__contains__, monotonic()
        )
        self._selector.register(connection, EVENT_READ)

    def _put_down(self, stranger: socket.socket) -> None:
        """Close a connection to no task of this job. A task of another rank than 0 then calls again."""
        del self._connections[stranger]
        self._selector.unregister(stranger)
        stranger.close()
        self._calls = 0 in self._missing
