"""A task that slept itself (stopped, or short of CPU) has heard nobody and blames nobody. By a clock of ours."""

from __future__ import annotations

import socket
import subprocess
import types
from collections.abc import Iterator

import pytest

from zeroexp.cluster import heartbeat
from zeroexp.cluster.heartbeat import BEATS_PER_PERIOD, Heartbeat

PERIOD_SECONDS = 30.0
BEAT = 1.001 * PERIOD_SECONDS / BEATS_PER_PERIOD  # a little more than from one beat to the next


class Clock:
    """Stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", types.SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def child() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def waited(task: Heartbeat, child: int, clock: Clock, seconds: list[float]) -> str | None:
    """What the task says when so much time passes from one of its beats to the next; "waits" if nothing."""
    left = iter(seconds)

    def until() -> str | None:
        passed = next(left, None)
        clock.now += passed or 0.0
        return "waits" if passed is None else None

    return task.wait(child, until)


def call(address: str) -> socket.socket:
    """A peer that says its name, and nothing more."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    connection.sendall(b"rank 1 on far\n")
    return connection


LOST = "rank 1 on far is gone: no sign of it for 30 s"
ASLEEP = 10 * PERIOD_SECONDS


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([BEAT] * 4, LOST),
        ([ASLEEP, BEAT, BEAT], "waits"),
        ([ASLEEP] * 3, "waits"),
        ([ASLEEP, *[BEAT] * 4], LOST),
    ],
    ids=["awake", "asleep once", "asleep all the time", "awake again"],
)
def test_silence_while_it_slept_is_no_loss(
    address: str, child: int, clock: Clock, seconds: list[float], said: str
) -> None:
    with Heartbeat(0, 2, address, PERIOD_SECONDS) as hub, call(address):
        assert waited(hub, child, clock, seconds) == said


@pytest.mark.parametrize(("beats", "waits"), [(1, True), (7, True), (9, False)])
def test_who_may_still_come_gets_the_time_that_was_slept(
    address: str, child: int, clock: Clock, beats: int, waits: bool
) -> None:
    """A minute to start in and a period: nine beats, of which one was before it slept."""
    with Heartbeat(0, 2, address, PERIOD_SECONDS, start_seconds=60) as hub:
        said = waited(hub, child, clock, [BEAT, ASLEEP, *[BEAT] * beats])
    never = f"rank 1 is gone: it did not reach port {address.rpartition(':')[2]} of 127.0.0.1"
    assert said == "waits" if waits else said is not None and said.startswith(never)
