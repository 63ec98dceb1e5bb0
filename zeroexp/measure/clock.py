"""How the seconds of a step divide into phases.

A mark is `time.perf_counter` on the CPU and an event in the current stream on CUDA. An event costs the host nothing
until it is read. `read` waits for the end of the step, so the loop calls it when the next step is already in flight.
"""

from __future__ import annotations

import time

import torch

PHASES = ("forward", "backward", "step")

Mark = float | torch.cuda.Event


class StepClock:
    """Times the phases of one step. It starts in "forward"; a phase lasts until the next one or `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str | None, Mark]] = []
        self.enter("forward")

    def enter(self, phase: str | None) -> str | None:
        """Enter one of PHASES and return the phase before. In None the clock stands still."""
        before = self._marks[-1][0] if self._marks else None
        self._marks.append((phase, self._mark()))
        return before

    def stop(self) -> None:
        self.enter(None)

    def read(self) -> tuple[float, dict[str, float]]:
        """Return (seconds of the step, seconds of each of PHASES); the phases add up to the step."""
        last = self._marks[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if phase is not None:
                phases[phase] += _seconds(start, end)
        return sum(phases.values()), phases

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1e3
    assert not isinstance(end, torch.cuda.Event)
    return end - start
