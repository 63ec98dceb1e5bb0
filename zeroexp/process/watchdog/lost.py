"""Tasks that are lost: a crashed node sends nothing, and its peers would wait.

    task of rank 0  ◀── one connection each ──▶  tasks of ranks 1 .. N-1      (who is a task: connection.py)

    each end  ── .<a report> ──▶  the other     a beat, again and again
              ── ! ───────────▶                 goodbye

Both ends send a beat three times per period and expect one within it. A task that ends for any reason says goodbye
first, so a connection that closes without a goodbye is a loss too. The ranks take no part in this: they may compute for
minutes. A beat carries what the task reports of its rank (hung.py).

A task that has not met its peers one period after the time that a job has to start misses them.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from zeroexp.process import ports
from zeroexp.process.watchdog.connection import Stranger, introduce

BEAT, BYE = ".", "!"  # how a line begins; a report may follow
MAX_LINE_BYTES = 4096
BEATS_PER_PERIOD = 3
START_SECONDS = 60.0  # from a job's first task to its last: Python may load from a slow shared disk
SECONDS_BETWEEN_CALLS = 1.0  # to the task of rank 0, until it listens
CALL_SECONDS = 5.0  # for a call, and for an introduction


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


@dataclass
class Hub:
    """The hub is where the task of rank 0 listens, with what its callers must know."""

    host: str
    file: Path  # in which it publishes its port
    secret: bytes
    ports: str | None = None  # the range that it may choose from
    port: int | None = None  # None: not published so far

    def __str__(self) -> str:
        return f"port {self.port} of {self.host}" if self.port else self.host


@dataclass
class Peer:
    """Another task of the job, once it has come."""

    name: str  # "rank 1 on node2"
    writer: StreamWriter
    heard: float  # the time of its last beat
    report: str = ""  # the newest, empty before the first
    left: bool = False

    def send(self, line: str) -> None:
        if not self.writer.is_closing():
            self.writer.write(f"{line}\n".encode())


class Heartbeat:
    """The heartbeat of one task; `hub` says where the task of rank 0 listens.

    It is a context manager, and leaving it says goodbye. name_of: the name of a rank that never connected and so never
    sent its own. report: called at every beat for the line that goes with it.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        hub: Hub,
        period_seconds: float,
        *,
        name_of: Callable[[int], str] = "rank {}".format,
        report: Callable[[], str] = str,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._me, self._hub = f"rank {rank} on {socket.gethostname()}", hub
        self._period, self._start = period_seconds, start_seconds
        self._name_of, self._report = name_of, report
        self._missing = set(range(1, world_size)) if rank == 0 else {0}
        self._peers: list[Peer] = []  # that ever came, also those that have left
        self._loop, self._news = asyncio.new_event_loop(), asyncio.Event()
        self._lost: str | None = None
        self._server: asyncio.Server | None = None
        self._looked = self._next_beat = self._loop.time()  # at the peers' silence
        # After this time no task may be missing.
        self._all_by = self._looked + self._start + self._period
        if rank != 0:
            self._loop.create_task(self._call())
        elif world_size > 1:
            self._loop.run_until_complete(self._listen(world_size))

    def wait(
        self, child: HasDescriptor, until: Callable[[], str | None] = lambda: None
    ) -> str | None:
        """Wait until this child has ended (None), a peer is lost (a message), or `until` returns a message.

        `until` is called at every beat.
        """
        return self._loop.run_until_complete(self._wait(child, until))

    async def _wait(self, child: HasDescriptor, until: Callable[[], str | None]) -> str | None:
        ended = asyncio.Event()
        self._loop.add_reader(child, lambda: (ended.set(), self._news.set()))
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._next_beat):
                        await self._news.wait()
                self._news.clear()
                if ended.is_set():
                    return await self._last_look()
                if message := self._lost or self._silent() or self._never_came():
                    return message
                if self._loop.time() >= self._next_beat:
                    self.tell_now()
                    self._next_beat = self._loop.time() + self._period / BEATS_PER_PERIOD
                    if message := until():
                        return message
        finally:
            self._loop.remove_reader(child)

    async def _last_look(self) -> str | None:
        """Return which peer is lost. Slurm ends the rest of a job that lost a task, so a child's end may follow."""
        for _ in ("what has arrived is read", "wakes who waits for it", "and is understood"):
            await asyncio.sleep(0)
        return self._lost

    @property
    def reports(self) -> list[str]:
        """The newest report of each task that has reported, without this one's."""
        return [peer.report for peer in self._peers if peer.report]

    def tell_now(self) -> None:
        """Send a beat though none is due."""
        report = self._report()
        for peer in self._peers:
            peer.send(f"{BEAT}{report}")

    def wait_for_goodbyes(self, seconds: float) -> None:
        """Wait until every task that ever came has left, at most for so long."""

        async def all_have_left() -> None:
            while not (self._lost or all(peer.left for peer in self._peers)):
                await self._news.wait()
                self._news.clear()

        with suppress(TimeoutError):
            self._loop.run_until_complete(asyncio.wait_for(all_have_left(), seconds))

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for peer in self._peers:
            peer.send(BYE)
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        if self._server:
            self._server.close()
        open_ends = asyncio.all_tasks() - {asyncio.current_task()}
        for each in open_ends:
            each.cancel()
        await asyncio.gather(*open_ends, return_exceptions=True)
        await asyncio.sleep(0)  # connections close a moment after their tasks

    async def _listen(self, world_size: int) -> None:
        try:
            listener = ports.listen_on_free_port(
                self._hub.host, self._hub.ports, backlog=world_size
            )
            self._hub.port = port = listener.getsockname()[1]
            ports.publish_port(self._hub.file, port)
        except OSError as error:  # the job can run without its heartbeat
            print(f"no heartbeat between tasks: {error}", file=sys.stderr)
            self._missing.clear()
            return
        self._server = await asyncio.start_server(
            self._meet, sock=listener, backlog=world_size, limit=MAX_LINE_BYTES
        )

    async def _call(self) -> None:
        """Connect to the task of rank 0, which may not have started yet, until it has been met."""
        while 0 in self._missing:
            self._hub.port = ports.read_published_port(self._hub.file)
            if self._hub.port is not None:
                where = self._hub.host, self._hub.port
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(CALL_SECONDS):
                        ends = await asyncio.open_connection(*where, limit=MAX_LINE_BYTES)
                    await self._meet(*ends)
            await asyncio.sleep(SECONDS_BETWEEN_CALLS)

    async def _meet(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Exchange names with the other end of a connection, and hear a task of this job until it hangs up."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                name, rank = await introduce(reader, writer, self._me, self._hub.secret)
            if rank in self._missing:
                self._missing.discard(rank)
                self._peers.append(Peer(name, writer, self._loop.time()))
                await self._hear(reader, self._peers[-1])
        except (Stranger, TimeoutError):
            pass
        finally:
            writer.close()

    async def _hear(self, reader: StreamReader, peer: Peer) -> None:
        self._news.set()
        with suppress(OSError, ValueError):  # it is gone, or sent what no task sends
            while line := (await reader.readline()).decode():
                peer.heard = self._loop.time()
                peer.left = peer.left or line.startswith(BYE)
                peer.report = line[1:].strip() or peer.report
                self._news.set()
        if not peer.left:
            self._lost = f"{peer.name} is gone: its connection closed without a word"
            self._news.set()

    def _silent(self) -> str | None:
        now = self._loop.time()
        if now - self._looked > self._period / 2:  # this task itself was stopped or short of CPU
            self._all_by += now - self._looked
            for peer in self._peers:
                peer.heard = now
        self._looked = now
        for peer in self._peers:
            if not peer.left and now - peer.heard > self._period:
                return f"{peer.name} is gone: no sign of it for {self._period:.0f} s"
        return None

    def _never_came(self) -> str | None:
        if not self._missing or self._loop.time() < self._all_by:
            return None
        first, *others = sorted(self._missing)
        nor = f", nor did {len(others)} more" if others else ""
        how = "answer from" if 0 in self._missing else "reach"
        return (
            f"{self._name_of(first)} is gone: it did not {how} {self._hub} "
            f"within {self._start:.0f} s + cluster.heartbeat_s={self._period:.0f}{nor}"
        )
