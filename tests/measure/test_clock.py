from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroexp.comm import bus
from zeroexp.measure import clock
from zeroexp.measure.clock import PHASES, StepClock
from zeroexp.process.world import World


class Seconds:
    """Time that passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 100.0
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self._now)

    def pass_by(self, seconds: float) -> None:
        self._now += seconds


def test_phases_add_up_to_the_step_and_a_pause_counts_nowhere(monkeypatch):
    seconds = Seconds(monkeypatch)
    step = StepClock(torch.device("cpu"))
    seconds.pass_by(1)
    for _ in range(2):
        step.enter("forward")
        seconds.pass_by(2)
        step.enter("backward")
        seconds.pass_by(4)
    assert step.enter(None) == "backward"
    seconds.pass_by(16)
    step.enter("step")
    seconds.pass_by(32)
    step.stop()
    seconds.pass_by(64)
    whole, phases = step.read()
    assert list(phases.items()) == list(zip(PHASES, (1, 4, 8, 0, 32), strict=True))
    assert whole == 45


def test_nothing_after_stop_counts(monkeypatch):
    seconds = Seconds(monkeypatch)
    step = StepClock(torch.device("cpu"))
    step.stop()
    seconds.pass_by(1)
    assert step.read()[0] == 0


class PlayedEvent:
    """What torch documents of an event, since no GPU is here: without a stream it is of the current device's."""

    def __init__(self, **_: Any) -> None:
        self.stream: torch.device | None = None

    def record(self, stream: torch.device | None = None) -> None:
        self.stream = stream or torch.device("cuda:0")


def mark_of_numbers(device: torch.device) -> PlayedEvent:
    """On fake tensors, which have no values to wait for."""
    events: list[PlayedEvent] = []
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", lambda: events.append(PlayedEvent()) or events[-1])
        World(0, 2, device, "nccl").read_later(torch.empty(3, device=device))
    return events[0]


@pytest.mark.parametrize("mark", [clock.mark_now, bus.mark, mark_of_numbers])
def test_a_mark_is_in_the_stream_of_its_device_whichever_is_the_current_one(mark, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", PlayedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    assert mark(torch.device("cuda:1")).stream == torch.device("cuda:1")
