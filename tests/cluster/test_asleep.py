"""A task that slept itself (stopped, or short of CPU) has heard nobody and blames nobody. By a clock of ours."""

from __future__ import annotations

import socket
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroexp.process import ports
from zeroexp.process.watchdog import lost
from zeroexp.process.watchdog.connection import Connection
from zeroexp.process.watchdog.lost import BEATS_PER_PERIOD, Heartbeat, Hub

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
    monkeypatch.setattr(lost, "time", types.SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def child() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def hub_at(tmp_path: Path) -> Hub:
    return Hub("127.0.0.1", tmp_path / "port", b"of this job")


def waited(task: Heartbeat, child: int, clock: Clock, seconds: list[float]) -> str | None:
    """What the task says when so much time passes from one of its beats to the next; "waits" if nothing."""
    left = iter(seconds)

    def until() -> str | None:
        passed = next(left, None)
        clock.now += passed or 0.0
        return "waits" if passed is None else None

    return task.wait(child, until)


def call(hub_at: Hub, hub: Heartbeat) -> socket.socket:
    """A peer that says who it is, before any time passes, and nothing more."""
    port = ports.read_published_port(hub_at.file)
    assert port is not None
    connection = socket.create_connection((hub_at.host, port), timeout=5)
    end = Connection(connection, "rank 1 on far", hub_at.secret, lambda rank: True, now=0.0)
    while not (end.name and list(hub._peers())):
        end.read(0.0)
        hub._hear([key.fileobj for key, _ in hub._selector.select(0.01)])
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
    hub_at: Hub, child: int, clock: Clock, seconds: list[float], said: str
) -> None:
    with Heartbeat(0, 2, hub_at, PERIOD_SECONDS) as hub, call(hub_at, hub):
        assert waited(hub, child, clock, seconds) == said


@pytest.mark.parametrize(("beats", "waits"), [(1, True), (7, True), (9, False)])
def test_who_may_still_come_gets_the_time_that_was_slept(
    hub_at: Hub, child: int, clock: Clock, beats: int, waits: bool
) -> None:
    """A minute to start in and a period: nine beats, of which one was before it slept."""
    with Heartbeat(0, 2, hub_at, PERIOD_SECONDS, start_seconds=60) as hub:
        said = waited(hub, child, clock, [BEAT, ASLEEP, *[BEAT] * beats])
    never = f"rank 1 is gone: it did not reach port {ports.read_published_port(hub_at.file)} of 127.0.0.1"
    assert said == "waits" if waits else said is not None and said.startswith(never)
