"""Tasks that notice each other's loss: over real sockets, with a peer that says what the test wants it to.

Time is the test's: it passes when `clock.pass_by` says so, and every task has its turn in each part of it.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.ports import kept_port
from zeroexp.cluster import heartbeat
from zeroexp.cluster.heartbeat import START_SECONDS, Clock, Heartbeat

PERIOD_SECONDS = 2.0
BEAT, BYE = b".\n", b"!\n"


class SteeredClock(Clock):
    """Tells a time that only the test moves; tasks look up many times in each of its seconds."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._looks: Counter[selectors.BaseSelector] = Counter()
        self._tasks: dict[selectors.BaseSelector, Future[str | None]] = {}

    def now(self) -> float:
        return self._now

    def select(
        self, selector: selectors.BaseSelector, seconds: float
    ) -> list[tuple[selectors.SelectorKey, int]]:
        self._looks[selector] += 1
        return selector.select(min(seconds, 0.002))

    def watch(self, selector: selectors.BaseSelector, task: Future[str | None]) -> None:
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


@pytest.fixture
def clock() -> SteeredClock:
    return SteeredClock()


@pytest.fixture
def address() -> Iterator[str]:
    kept, port = kept_port()
    with kept:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """What the tasks wait for; it ends when the test says so."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


class Task:
    """A Heartbeat that waits for `child` in a thread."""

    def __init__(
        self,
        rank: int,
        address: str,
        child: subprocess.Popen[bytes],
        clock: SteeredClock,
        world_size: int = 2,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1)
        self._heartbeat = Heartbeat(
            rank, world_size, address, PERIOD_SECONDS, start_seconds=start_seconds, clock=clock
        )
        self._lost = self._threads.submit(self._wait, child.pid)
        clock.watch(self._heartbeat._selector, self._lost)
        clock.let_all_look()

    def _wait(self, pid: int) -> str | None:
        with self._heartbeat:
            return self._heartbeat.wait(pid)

    def lost(self) -> str | None:
        return self._lost.result(timeout=600)

    @property
    def waits(self) -> bool:
        return not self._lost.done()


def peer(address: str, clock: SteeredClock, *words: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(b"".join(words))
    clock.let_all_look()
    return connection


def test_nobody_is_lost_where_all_end(
    address: str, child: subprocess.Popen[bytes], clock: SteeredClock
) -> None:
    hub = Task(0, address, child, clock, start_seconds=0)
    member = Task(1, address, child, clock, start_seconds=0)
    clock.pass_by(4 * PERIOD_SECONDS)  # beats keep them from missing each other
    assert hub.waits and member.waits
    child.kill()
    assert (hub.lost(), member.lost()) == (None, None)


def test_a_member_may_start_long_before_the_hub(
    address: str, child: subprocess.Popen[bytes], clock: SteeredClock
) -> None:
    """Longer than it would wait for a machine that does not answer: this one refuses its calls."""
    member = Task(1, address, child, clock, start_seconds=0)
    clock.pass_by(3 * PERIOD_SECONDS)
    assert member.waits
    hub = Task(0, address, child, clock, start_seconds=0)
    clock.pass_by(3 * PERIOD_SECONDS)
    assert hub.waits and member.waits, "they have met"
    child.kill()
    assert (hub.lost(), member.lost()) == (None, None)


def test_silence_is_a_loss(
    address: str, child: subprocess.Popen[bytes], clock: SteeredClock
) -> None:
    hub = Task(0, address, child, clock)
    with peer(address, clock, b"rank 1 on far\n", BEAT):
        clock.pass_by(0.75 * PERIOD_SECONDS)
        assert hub.waits
        clock.pass_by(0.5 * PERIOD_SECONDS)
        assert hub.lost() == "rank 1 on far is gone: no sign of it for 2 s"


def test_a_task_that_slept_itself_misses_nobody(
    address: str, child: subprocess.Popen[bytes], clock: SteeredClock
) -> None:
    """What the peer said meanwhile lies unread, and it gets a whole period to say more; who was to come, too."""
    hub = Task(0, address, child, clock, world_size=3, start_seconds=1)
    with peer(address, clock, b"rank 1 on far\n", BEAT) as far:
        clock.jump(10 * PERIOD_SECONDS)
        clock.pass_by(0.75 * PERIOD_SECONDS)
        assert hub.waits
        far.sendall(BYE)
        clock.pass_by(PERIOD_SECONDS)
        assert str(hub.lost()).startswith("rank 2 is gone: it did not reach port")


def test_a_closed_connection_is_a_loss_at_once(
    address: str, child: subprocess.Popen[bytes], clock: SteeredClock
) -> None:
    hub = Task(0, address, child, clock)
    peer(address, clock, b"rank 1 on far\n", BEAT).close()
    assert hub.lost() == "rank 1 on far is gone: its connection closed without a word"


def test_who_never_came_is_missed(
    address: str, child: subprocess.Popen[bytes], clock: SteeredClock
) -> None:
    hub = Task(0, address, child, clock, world_size=4, start_seconds=1)
    with peer(address, clock, b"rank 2 on far\n", BEAT, BYE):
        clock.pass_by(PERIOD_SECONDS)
        assert hub.waits
        clock.pass_by(1.5)
        port = address.rpartition(":")[2]
        silence = f"did not reach port {port} of 127.0.0.1 within 1 s + cluster.heartbeat_s=2"
        assert hub.lost() == f"rank 1 is gone: it {silence}, nor did 1 more"


def test_a_hub_whose_machine_says_nothing_is_missed(
    child: subprocess.Popen[bytes], clock: SteeredClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue that is full answers no further call, as a machine without power."""
    monkeypatch.setattr(heartbeat, "CALL_SECONDS", 0.01)  # of real time: this call is given up
    with socket.socket() as deaf, socket.socket() as last_answered:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        last_answered.connect(deaf.getsockname())
        port = deaf.getsockname()[1]
        member = Task(1, f"127.0.0.1:{port}", child, clock, start_seconds=1)
        clock.pass_by(PERIOD_SECONDS)
        assert member.waits
        clock.pass_by(1.5)
        silence = f"did not answer from port {port} of 127.0.0.1 within 1 s + cluster.heartbeat_s=2"
        assert member.lost() == f"rank 0 is gone: it {silence}"


def test_a_hub_without_a_port_misses_nobody(
    child: subprocess.Popen[bytes], clock: SteeredClock
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hub = Task(0, f"127.0.0.1:{taken.getsockname()[1]}", child, clock, start_seconds=0)
        clock.pass_by(3 * PERIOD_SECONDS)
        assert hub.waits
    child.kill()
    assert hub.lost() is None


def test_who_said_goodbye_is_not_missed(
    address: str, child: subprocess.Popen[bytes], clock: SteeredClock
) -> None:
    hub = Task(0, address, child, clock)
    peer(address, clock, b"rank 1 on far\n", BEAT, BYE).close()
    clock.pass_by(4 * PERIOD_SECONDS)
    assert hub.waits
    child.kill()
    assert hub.lost() is None


def test_a_stranger_is_shown_out(
    address: str, child: subprocess.Popen[bytes], clock: SteeredClock
) -> None:
    hub = Task(0, address, child, clock)
    with peer(address, clock, b"GET / HTTP/1.1\r\n") as stranger:
        while stranger.recv(4096):  # our name, then the end
            pass
    child.kill()
    assert hub.lost() is None
