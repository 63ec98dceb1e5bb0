"""Tasks that notice each other's loss: over real sockets, with a peer that says what the test wants it to.

Time is the test's: it passes when `clock.pass_by` says so, and every task has its turn in each part of it.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from selectors import BaseSelector, DefaultSelector, SelectorKey

import pytest

from zeroexp.process import ports
from zeroexp.process.watchdog import lost
from zeroexp.process.watchdog.connection import Connection, Stranger
from zeroexp.process.watchdog.hung import WatchedRank
from zeroexp.process.watchdog.lost import BEATS_PER_PERIOD, Heartbeat, HeartbeatAddress

PERIOD_SECONDS = 2.0
BEAT, BYE = b".\n", b"!\n"


class SteeredClock:
    """Tells a time that only the test moves; tasks look up many times in each of its seconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._now = 1000.0
        self._looks: Counter[BaseSelector] = Counter()
        self.longest_pause = 0.0  # that a task would have made between two looks
        self._tasks: dict[BaseSelector, Future[str | None]] = {}
        looks, clock = self._looks, self

        class Selector(DefaultSelector):
            def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
                looks[self] += 1
                clock.longest_pause = max(clock.longest_pause, timeout or 0.0)
                return super().select(min(timeout or 0.0, 0.002))

        patch.setattr(lost, "monotonic", lambda: self._now)
        patch.setattr(lost, "DefaultSelector", Selector)

    def watch(self, selector: BaseSelector, task: Future[str | None]) -> None:
        """Time does not pass before this task has looked."""
        self._tasks[selector] = task

    def pass_by(self, seconds: float) -> None:
        """In parts so small that no task believes to have slept."""
        end = self._now + seconds
        while self._now < end:
            self._now += PERIOD_SECONDS / 8
            self.let_all_look()

    def jump(self, seconds: float) -> None:
        """As where a machine stood still, and all its tasks with it."""
        self._now += seconds
        self.let_all_look()

    def let_all_look(self) -> None:
        """Twice: once to do what is due, and then to hear what the others did."""
        before = self._looks.copy()
        for selector, task in self._tasks.items():
            while not task.done() and self._looks[selector] < before[selector] + 3:
                time.sleep(0.001)


SECRET = b"of this job"


class Task:
    """A Heartbeat that waits for the job's child in a thread."""

    def __init__(
        self, job: Job, rank: int, hub: HeartbeatAddress, world_size: int, start_seconds: float
    ) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1)
        child = WatchedRank(rank, job.child.pid, memoryview(b""), Path())
        self._heartbeat = Heartbeat(
            child, world_size, hub, PERIOD_SECONDS, start_seconds=start_seconds
        )
        self._lost = self._threads.submit(self._wait)
        job.clock.watch(self._heartbeat._selector, self._lost)
        job.clock.let_all_look()

    def _wait(self) -> str | None:
        with self._heartbeat:
            return self._heartbeat.wait()

    def lost(self) -> str | None:
        return self._lost.result(timeout=600)

    @property
    def waits(self) -> bool:
        return not self._lost.done()


class Job:
    """Tasks on one clock, whose child ends when the test says so, and who calls them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.clock, self.hub = (
            SteeredClock(patch),
            HeartbeatAddress("127.0.0.1", folder / "port", SECRET),
        )
        self.child = subprocess.Popen(["sleep", "1000"])

    def task(
        self,
        rank: int,
        world_size: int = 2,
        *,
        start: float = 60.0,
        hub: HeartbeatAddress | None = None,
    ) -> Task:
        return Task(self, rank, hub or self.hub, world_size, start)

    def end(self, *tasks: Task) -> list[str | None]:
        """What each task lost, when its child has ended."""
        self.child.kill()
        return [task.lost() for task in tasks]

    def call(self) -> socket.socket:
        port = ports.read_published_port(self.hub.file)
        assert port is not None
        return socket.create_connection((self.hub.host, port))

    def introduce(self, connection: socket.socket, name: str, secret: bytes) -> None:
        """Say who calls, as a task does, and hear who answers."""
        end = Connection(connection, name, secret, lambda rank: True, now=0.0)
        while end.read(0.0) and not end.name:
            self.clock.let_all_look()
        connection.setblocking(True)

    def peer(self, name: str, *words: bytes) -> socket.socket:
        connection = self.call()
        self.introduce(connection, name, SECRET)
        connection.sendall(b"".join(words))
        self.clock.let_all_look()
        return connection

    def has_closed(self, stranger: socket.socket) -> bool:
        stranger.settimeout(600)
        self.clock.let_all_look()
        with suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
        return True


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(tmp_path, monkeypatch)
    yield made
    made.child.kill()
    made.child.wait()


def test_nobody_is_lost_where_all_end(job: Job) -> None:
    hub = job.task(0, start=0)
    member = job.task(1, start=0)
    job.clock.pass_by(4 * PERIOD_SECONDS)  # beats keep them from missing each other
    assert hub.waits and member.waits
    assert job.end(hub, member) == [None, None]


def test_a_member_may_start_before_the_hub(job: Job) -> None:
    member = job.task(1, start=3 * PERIOD_SECONDS)
    job.clock.pass_by(3 * PERIOD_SECONDS)
    assert member.waits
    hub = job.task(0, start=0)
    job.clock.pass_by(3 * PERIOD_SECONDS)
    assert hub.waits and member.waits, "they have met"
    assert job.end(hub, member) == [None, None]


def test_a_member_whose_call_was_refused_calls_again(job: Job) -> None:
    """First by nobody at the port, then by another program there, twice."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    member = job.task(1, start=9 * PERIOD_SECONDS)
    ports.publish_port(job.hub.file, port)
    job.clock.pass_by(PERIOD_SECONDS)
    with socket.create_server(("127.0.0.1", port)) as stranger:
        stranger.setblocking(False)
        for _ in range(2):
            job.clock.pass_by(PERIOD_SECONDS)
            stranger.accept()[0].close()
    job.clock.pass_by(PERIOD_SECONDS)
    hub = job.task(0, start=1)
    job.clock.pass_by(4 * PERIOD_SECONDS)
    assert hub.waits and member.waits, "they have met"
    assert job.end(hub, member) == [None, None]


def test_silence_is_a_loss(job: Job) -> None:
    hub = job.task(0)
    with job.peer("rank 1 on far", BEAT):
        job.clock.pass_by(0.75 * PERIOD_SECONDS)
        assert hub.waits
        job.clock.pass_by(0.5 * PERIOD_SECONDS)
        assert hub.lost() == "rank 1 on far is gone: no sign of it for 2 s (cluster.heartbeat_s)"


BEAT_SECONDS = 1.001 * PERIOD_SECONDS / BEATS_PER_PERIOD  # a little more than from beat to beat
ASLEEP = 10 * PERIOD_SECONDS


@pytest.mark.parametrize(
    ("seconds", "waits"),
    [
        ([BEAT_SECONDS] * 4, False),
        ([ASLEEP, BEAT_SECONDS, BEAT_SECONDS], True),
        ([ASLEEP] * 3, True),
        ([ASLEEP, *[BEAT_SECONDS] * 4], False),
    ],
    ids=["awake", "asleep once", "asleep all the time", "awake again"],
)
def test_silence_while_it_slept_is_no_loss(job: Job, seconds: list[float], waits: bool) -> None:
    hub = job.task(0)
    with job.peer("rank 1 on far"):
        for each in seconds:
            job.clock.jump(each)
        assert hub.waits == waits
        job.child.kill()
        lost = "rank 1 on far is gone: no sign of it for 2 s (cluster.heartbeat_s)"
        assert hub.lost() == (None if waits else lost)


@pytest.mark.parametrize(("beats", "waits"), [(1, True), (7, True), (9, False)])
def test_who_may_still_come_gets_the_time_that_was_slept(job: Job, beats: int, waits: bool) -> None:
    """Two periods to start in and one more: nine beats, of which one was before it slept."""
    hub = job.task(0, start=2 * PERIOD_SECONDS)
    for each in [BEAT_SECONDS, ASLEEP, *[BEAT_SECONDS] * beats]:
        job.clock.jump(each)
    assert hub.waits == waits
    job.child.kill()
    lost = f"rank 1 is gone: it did not reach port {ports.read_published_port(job.hub.file)} of 127.0.0.1"
    assert str(hub.lost()).startswith("None" if waits else lost)


def test_a_closed_connection_is_a_loss_at_once(job: Job) -> None:
    hub = job.task(0)
    job.peer("rank 1 on far", BEAT).close()
    assert hub.lost() == "rank 1 on far is gone: its connection closed without a word"


def test_who_never_came_is_missed(job: Job) -> None:
    hub = job.task(0, world_size=4, start=1)
    with job.peer("rank 2 on far", BEAT, BYE):
        job.clock.pass_by(PERIOD_SECONDS)
        assert hub.waits
        job.clock.pass_by(1.5)
        port = ports.read_published_port(job.hub.file)
        silence = f"did not reach port {port} of 127.0.0.1 within 1 s + cluster.heartbeat_s=2"
        assert hub.lost() == f"rank 1 is gone: it {silence}, nor did 1 more"


def test_a_hub_that_never_came_is_missed(job: Job) -> None:
    member = job.task(1, start=1)
    job.clock.pass_by(PERIOD_SECONDS)
    assert member.waits
    job.clock.pass_by(1.5)
    silence = "did not answer from 127.0.0.1 within 1 s + cluster.heartbeat_s=2"
    assert member.lost() == f"rank 0 is gone: it {silence}"
    assert job.clock.longest_pause < PERIOD_SECONDS / 2, "else it would believe to have slept"


def test_a_hub_without_a_port_misses_nobody_and_is_not_missed(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        hub = job.task(0, start=0, hub=replace(job.hub, ports=f"{port}-{port}"))
        member = job.task(1, start=0)
        job.clock.pass_by(3 * PERIOD_SECONDS)
        assert hub.waits and member.waits
    assert job.end(hub, member) == [None, None]


def test_who_said_goodbye_is_not_missed(job: Job) -> None:
    hub = job.task(0)
    job.peer("rank 1 on far", BEAT, BYE).close()
    job.clock.pass_by(4 * PERIOD_SECONDS)
    assert hub.waits
    assert job.end(hub) == [None]


TEXTS = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "a name alone": b"rank 1 on far\n",
    "no proof": b"0" * 32 + b"\nrank 1 on far " + b"0" * 64 + b"\n",
    "no line": b"x" * 5000,
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_stranger_is_shown_out_and_ends_nothing(job: Job, text: str) -> None:
    hub = job.task(0)
    with job.call() as stranger:
        stranger.sendall(TEXTS[text])
        assert job.has_closed(stranger)
    with job.peer("rank 1 on far", BEAT, BYE):
        job.clock.pass_by(PERIOD_SECONDS)
        assert hub.waits
    assert job.end(hub) == [None]


@pytest.mark.parametrize(
    ("name", "secret"),
    [("rank 1 on far", b"of another"), ("rank 0 on far", SECRET), ("rank 2 on far", SECRET)],
)
def test_who_knows_no_secret_or_has_no_place_is_shown_out(job, name, secret):
    hub = job.task(0)
    with job.call() as stranger:
        with suppress(Stranger):
            job.introduce(stranger, name, secret)
        assert job.has_closed(stranger) and hub.waits
    assert job.end(hub) == [None]


def test_a_rank_comes_once(job: Job) -> None:
    """A second one of its name is closed, and its end is no loss."""
    hub = job.task(0)
    with job.peer("rank 1 on far", BEAT), job.call() as second:
        with suppress(Stranger):
            job.introduce(second, "rank 1 on far", SECRET)
        assert job.has_closed(second) and hub.waits
        assert job.end(hub) == [None]


def test_who_speaks_a_byte_at_a_time_delays_nobody(job: Job) -> None:
    """Time passes only as the hub looks up; the slow caller has its time for an introduction, and no more."""
    hub = job.task(0)
    with job.call() as slow, job.peer("rank 1 on far", BEAT) as far:
        for _ in range(4):
            slow.sendall(b"0")
            job.clock.pass_by(0.75 * PERIOD_SECONDS)
            far.sendall(BEAT)
            job.clock.let_all_look()
        assert hub.waits
        assert job.has_closed(slow), "after CALL_SECONDS, though it said something all the time"
        far.sendall(BYE)
        job.clock.let_all_look()
    assert job.end(hub) == [None]
