"""Clock of one step: it divides the step's seconds into phases.

A mark is `time.perf_counter` on the CPU and an event in the device's current stream on CUDA. An event costs the host
nothing until it is read. `read` waits for the end of the step, so the loop calls it when the next is in flight.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch.optim import Optimizer

# "optimizer" is the optimizer's own step, "step" the rest of `strategy.step`: reductions that end, norm, publish.
PHASES = ("data", "forward", "backward", "optimizer", "step")

Mark = float | torch.cuda.Event


class StepClock:
    """Times the phases of one step. It starts in "data"; a phase lasts until the next one or `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The phases entered so far and when, None where the clock stands still.
        self.marks: list[tuple[str | None, Mark]] = []
        self.enter("data")

    def enter(self, phase: str | None) -> str | None:
        """Enter one of PHASES and return the phase before. In None the clock stands still."""
        before = self.marks[-1][0] if self.marks else None
        self.marks.append((phase, mark_now(self._device)))
        return before

    @contextmanager
    def timing_optimizer(self, optimizer: Optimizer) -> Generator[None]:
        """Count what `optimizer.step()` takes inside as the phase "optimizer"."""

        def enter(phase: str, *_: object) -> None:
            self.enter(phase)

        with (
            optimizer.register_step_pre_hook(partial(enter, "optimizer")),
            optimizer.register_step_post_hook(partial(enter, "step")),
        ):
            yield

    def stop(self) -> None:
        self.enter(None)

    def read(self) -> tuple[float, dict[str, float]]:
        """Return (seconds of the step, seconds of each of PHASES); the phases add up to the step."""
        phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            if phase is not None:
                phases[phase] += seconds_between(start, end)
        return sum(phases.values()), phases


def mark_now(device: torch.device) -> Mark:
    """Return a point in time: on CUDA in the device's current stream, else `time.perf_counter`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    assert not isinstance(end, torch.cuda.Event)
    return end - start
