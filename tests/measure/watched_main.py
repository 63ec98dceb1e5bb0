"""Ranks of which one keeps objects (test_drift.py), or takes long to write what it saw of a step (test_trace.py)."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeroexp.measure.instruments import Instruments
from zeroexp.run import rank

EARLY = "early"
LONG = 0.5  # seconds, in which a step of the test's model would begin and end many times
prepare = rank.prepare


def keeper(folder: Path, *, device: str) -> None:
    """Rank 1 keeps ten objects of every step."""
    kept: list[object] = []
    slows = Instruments.slows

    def keeping(self: Instruments, step: int) -> bool:
        kept.extend(object() for _ in range(10 * self.world.rank))
        return slows(self, step)

    Instruments.slows = keeping
    rank.main(folder, device=device)


def slow_writer(folder: Path, *, device: str) -> None:
    """Rank 0 leaves the file EARLY where rank 1 has begun the next step before rank 0 has written its timeline."""
    write, watching = Instruments.write_timeline, Instruments.watching

    def begun(number: int) -> Path:
        return folder / f"begun.{number}"

    def slowly(self: Instruments, step: int, *rest: Any) -> None:
        write(self, step, *rest)
        if self.world.rank == 0 and step in self.settings.trace_steps:
            time.sleep(LONG)
            if begun(step + 1).exists():
                (folder / EARLY).touch()

    @contextmanager
    def noted(self: Instruments, step: int, *rest: Any, **more: Any) -> Generator[Any]:
        if self.world.rank == 1:
            begun(step).touch()
        with watching(self, step, *rest, **more) as trace:
            yield trace

    Instruments.write_timeline, Instruments.watching = slowly, noted
    rank.main(folder, device=device)
