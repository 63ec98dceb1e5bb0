"""Tasks that notice each other's loss: over real sockets, with a peer that says what the test wants it to."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from zeroexp.cluster.heartbeat import BEAT, BYE, START_SECONDS, Heartbeat

PERIOD_SECONDS = 2.0  # two threads of a busy machine must each get their turn within it


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """What the tasks wait for; it ends when the test says so."""
    process = subprocess.Popen(["sleep", "60"])
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
        world_size: int = 2,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1)
        self._heartbeat = Heartbeat(
            rank, world_size, address, PERIOD_SECONDS, start_seconds=start_seconds
        )
        self._lost = self._threads.submit(self._wait, child.pid)

    def _wait(self, pid: int) -> str | None:
        with self._heartbeat:
            return self._heartbeat.wait(pid)

    def lost(self) -> str | None:
        return self._lost.result(timeout=10)

    @property
    def waits(self) -> bool:
        return not self._lost.done()


def peer(address: str, *words: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    connection.sendall(b"".join(words))  # at once: a pause between two words could pass for silence
    return connection


def test_nobody_is_lost_where_all_end(address: str, child: subprocess.Popen[bytes]) -> None:
    hub, member = Task(0, address, child), Task(1, address, child)
    time.sleep(2 * PERIOD_SECONDS)  # beats keep them from missing each other
    assert hub.waits and member.waits
    child.kill()
    assert (hub.lost(), member.lost()) == (None, None)


def test_a_member_may_start_long_before_the_hub(
    address: str, child: subprocess.Popen[bytes]
) -> None:
    """Longer than it would wait for a machine that does not answer: this one refuses its calls."""
    member = Task(1, address, child, start_seconds=0)
    time.sleep(1.5 * PERIOD_SECONDS)
    assert member.waits
    hub = Task(0, address, child)
    time.sleep(1.5)
    child.kill()
    assert (hub.lost(), member.lost()) == (None, None)


def test_silence_is_a_loss(address: str, child: subprocess.Popen[bytes]) -> None:
    hub = Task(0, address, child)
    with peer(address, b"rank 1 on far\n", BEAT):
        assert hub.lost() == "rank 1 on far is gone: no sign of it for 2 s"


def test_a_closed_connection_is_a_loss_at_once(
    address: str, child: subprocess.Popen[bytes]
) -> None:
    hub = Task(0, address, child)
    peer(address, b"rank 1 on far\n", BEAT).close()
    assert hub.lost() == "rank 1 on far is gone: its connection closed without a word"


def test_who_never_came_is_missed(address: str, child: subprocess.Popen[bytes]) -> None:
    hub = Task(0, address, child, world_size=4, start_seconds=1)
    with peer(address, b"rank 2 on far\n", BEAT, BYE):
        port = address.rpartition(":")[2]
        silence = f"did not reach port {port} of 127.0.0.1 within 1 s + cluster.heartbeat_s=2"
        assert hub.lost() == f"rank 1 is gone: it {silence}, nor did 1 more"


def test_a_hub_whose_machine_says_nothing_is_missed(child: subprocess.Popen[bytes]) -> None:
    """A queue that is full answers no further call, as a machine without power."""
    with socket.socket() as deaf, socket.socket() as last_answered:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        last_answered.connect(deaf.getsockname())
        port = deaf.getsockname()[1]
        member = Task(1, f"127.0.0.1:{port}", child, start_seconds=1)
        silence = f"did not answer from port {port} of 127.0.0.1 within 1 s + cluster.heartbeat_s=2"
        assert member.lost() == f"rank 0 is gone: it {silence}"


def test_a_hub_without_a_port_misses_nobody(child: subprocess.Popen[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hub = Task(0, f"127.0.0.1:{taken.getsockname()[1]}", child, start_seconds=0)
        time.sleep(1.5 * PERIOD_SECONDS)
        assert hub.waits
    child.kill()
    assert hub.lost() is None


def test_who_said_goodbye_is_not_missed(address: str, child: subprocess.Popen[bytes]) -> None:
    hub = Task(0, address, child)
    peer(address, b"rank 1 on far\n", BEAT, BYE).close()
    time.sleep(2 * PERIOD_SECONDS)
    assert hub.waits
    child.kill()
    assert hub.lost() is None


def test_a_stranger_is_shown_out(address: str, child: subprocess.Popen[bytes]) -> None:
    hub = Task(0, address, child)
    with peer(address, b"GET / HTTP/1.1\r\n") as stranger:
        while stranger.recv(4096):  # our name, then the end
            pass
    child.kill()
    assert hub.lost() is None
