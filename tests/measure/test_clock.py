from __future__ import annotations

import pytest
import torch

from zeroexp.measure import clock
from zeroexp.measure.clock import PHASES, StepClock


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
