"""Show a running sweep: a few lines redrawn in place on a terminal, one line per event in a pipe.

On a terminal a frame is one write: the cursor goes up, every line is overwritten and its rest erased, so nothing is
ever blank and nothing flickers. Lines of ended points stay above the frame.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from zeroexp.measure.drift import rising
from zeroexp.measure.record import StepRecord

STEPS_OF_DRIFT = 300  # so often a run is asked whether it drifts while it goes on
SECONDS_BETWEEN_FRAMES = 0.1
SECONDS_BETWEEN_STEP_LINES = 5.0  # per point in a pipe; its first and last step always show
MAX_RUNNING_LINES = 8


@dataclass
class _ShownPoint:
    number: int  # from 1
    name: str
    num_steps: int
    started: float
    record: StepRecord | None = None
    # When steps were seen first, and how many were done then.
    first_seen: tuple[float, int] | None = None
    line_shown: float = float("-inf")
    recent: list[StepRecord] = field(default_factory=list[StepRecord])  # that were not judged yet

    @property
    def num_done(self) -> int:
        return self.record.step + 1 if self.record else 0

    def eta(self, now: float) -> float | None:
        """Return the seconds to the last step, from the mean of the steps after the first seen; None before two."""
        if self.first_seen is None or self.num_done >= self.num_steps:
            return None
        since, num_before = self.first_seen
        if self.num_done == num_before:
            return None
        pace = (now - since) / (self.num_done - num_before)
        return pace * (self.num_steps - self.num_done)


class SweepProgress:
    """The progress of `num_points` sweep points, of which any number may run at once. A context manager."""

    def __init__(
        self,
        num_points: int,
        stream: TextIO | None = None,  # None: standard error
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_points = num_points
        self._stream, self._clock = stream or sys.stderr, clock
        self._live = self._stream.isatty()
        self._running: dict[int, _ShownPoint] = {}
        self._ended: Counter[str] = Counter()  # ended points by status
        self._num_lines = 0  # of the frame on the screen
        self._drawn = float("-inf")

    def start(self, number: int, name: str, num_steps: int) -> None:
        """Point `number` (from 1) starts; `num_steps` counts warm-up steps too."""
        self._running[number] = _ShownPoint(number, name, num_steps, started=self._clock())
        self.note(f"[{number}/{self._num_points}] {name}: started")

    def step(self, number: int, record: StepRecord, *, is_newest: bool = True) -> None:
        """is_newest: no later step was read at the same time, as of a run that had begun before."""
        point, now = self._running[number], self._clock()
        if record.step < point.num_done:  # it goes on from a checkpoint, and was away
            point.first_seen = None
        point.record = record
        point.recent.append(record)
        if len(point.recent) == STEPS_OF_DRIFT:
            for what, how in rising(point.recent).items():
                self.note(f"[{number}/{self._num_points}] {point.name}: {what} {how}")
            point.recent.clear()
        if is_newest:
            point.first_seen = point.first_seen or (now, point.num_done)
        if self._live:
            self._draw(now)
        elif (
            point.num_done == point.num_steps
            or now - point.line_shown >= SECONDS_BETWEEN_STEP_LINES
        ):
            point.line_shown = now
            self._write(self._step_line(point, now) + "\n")

    def end(self, number: int, status: str, reason: str | None = None, name: str = "") -> None:
        """Point `number` has ended. A skipped point, which never started, needs its `name`.

        Of a reason of several lines the first is shown; the table at the end has them all.
        """
        point = self._running.pop(number, None)
        took, why = "", f": {reason.splitlines()[0]}" if reason else ""
        if point is not None:
            name, seconds = point.name, self._clock() - point.started
            took = f" in {duration(seconds)}"
        self._ended[status] += 1
        self.note(f"[{number}/{self._num_points}] {name}: {status}{took}{why}")

    def again(self, num_points: int = 1) -> None:
        """Points that have ended will run once more."""
        self._num_points += num_points

    def __enter__(self) -> SweepProgress:
        return self

    def __exit__(self, *_: object) -> None:
        """Erase the frame from the screen; the lines above it stay."""
        if self._live and self._num_lines:
            self._write(f"\x1b[{self._num_lines}A\x1b[J")

    def note(self, line: str) -> None:
        """Show a line that belongs to no step."""
        if self._live:
            self._draw(self._clock(), above=line)
        else:
            self._write(line + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _draw(self, now: float, above: str | None = None) -> None:
        if above is None and now - self._drawn < SECONDS_BETWEEN_FRAMES:
            return
        width = shutil.get_terminal_size().columns - 1
        lines = [line[:width] for line in self._frame(now)]
        up = f"\x1b[{self._num_lines}A" if self._num_lines else ""
        body = "".join(f"{line}\x1b[K\n" for line in [*([above] if above else []), *lines])
        self._write(up + body + "\x1b[J")
        self._num_lines, self._drawn = len(lines), now

    def _frame(self, now: float) -> list[str]:
        running = sorted(self._running.values(), key=lambda point: point.number)
        shown = [self._step_line(point, now) for point in running[:MAX_RUNNING_LINES]]
        if len(running) > MAX_RUNNING_LINES:
            shown.append(f"... and {len(running) - MAX_RUNNING_LINES} more running")
        return [*shown, self._sweep_line()]

    def _sweep_line(self) -> str:
        counts = (f"{count} {status}" for status, count in self._ended.items())
        ended = f"{self._ended.total()}/{self._num_points} points ended"
        return " | ".join([ended, *counts])

    def _step_line(self, point: _ShownPoint, now: float) -> str:
        head = f"[{point.number}/{self._num_points}] {point.name}"
        if point.record is None:
            return f"{head} | starting"
        r = point.record
        validated = "" if r.validation_loss is None else f" (validation {r.validation_loss:.4f})"
        parts = [
            head,
            f"step {point.num_done}/{point.num_steps}" + (" warm-up" if r.warmup else ""),
            f"loss {r.loss:.4f}{validated}",
            f"{r.step_seconds * 1e3:.0f} ms",
            f"{r.num_tokens / r.step_seconds:,.0f} tokens/s",
        ]
        if (eta := point.eta(now)) is not None:
            parts.append(f"{duration(eta)} left")
        return " | ".join(parts)


def duration(seconds: float) -> str:
    """Format seconds: 1.2 s, 47 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
