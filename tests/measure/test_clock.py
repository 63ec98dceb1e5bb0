from __future__ import annotations

import time

import pytest
import torch

from zeroexp.measure.clock import PHASES, StepClock


def test_phases_add_up_to_the_step_and_a_pause_counts_nowhere():
    began = time.perf_counter()
    clock = StepClock(torch.device("cpu"))
    time.sleep(0.01)
    for _ in range(2):
        clock.enter("forward")
        time.sleep(0.01)
        clock.enter("backward")
        time.sleep(0.02)
    assert clock.enter(None) == "backward"
    time.sleep(0.05)
    clock.enter("step")
    time.sleep(0.005)
    clock.stop()
    elapsed = time.perf_counter() - began
    seconds, phases = clock.read()
    assert tuple(phases) == PHASES
    assert phases["forward"] >= 0.03 and phases["backward"] >= 0.04 and phases["step"] >= 0.005
    assert seconds == pytest.approx(sum(phases.values()))
    assert seconds <= elapsed - 0.05


def test_nothing_after_stop_counts():
    clock = StepClock(torch.device("cpu"))
    clock.stop()
    time.sleep(0.02)
    assert clock.read()[0] < 0.02
