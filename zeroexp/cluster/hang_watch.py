"""The task's part in finding a hang: it looks at its own rank, and the task of rank 0 at what all tasks report.

every task ── the Sight of its rank, in each beat ──▶ task of rank 0
           ◀────────────── HUNG ────────────────
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from zeroexp.cluster.hang import Sight, Watched, leave_stacks, ranks_behind, write_hang
from zeroexp.cluster.heartbeat import BEATS_PER_PERIOD, Heartbeat

HUNG = "the ranks hang"


class Lookout:
    """`report` is called at every beat, then `verdict` with the reports of the other tasks."""

    def __init__(
        self,
        watched: Watched,
        folder: Path,
        rank: int,
        world_size: int,
        hang_seconds: float | None,
        period_seconds: float,
    ) -> None:
        self.hung = False
        self._watched, self._folder = watched, folder
        self._rank, self._world_size = rank, world_size
        self._hang_seconds, self._beat_seconds = hang_seconds, period_seconds / BEATS_PER_PERIOD
        self._looked = time.monotonic()
        self._sight = watched.look(0.0)

    def report(self) -> str:
        """Look at the rank, and return what the beat says of it."""
        if self.hung or self._hang_seconds is None:
            return HUNG if self.hung else ""
        now = time.monotonic()
        # Where this task itself was stopped, as by a suspended job, its rank is not to blame.
        passed, self._looked = min(now - self._looked, 2 * self._beat_seconds), now
        self._sight = self._watched.look(passed)
        return self._sight.line()

    def verdict(self, reports: Sequence[str]) -> str | None:
        """Return a message once the ranks hang; rank 0's task has then written failure.json."""
        if HUNG in reports:
            self.hung = True
        elif self._hang_seconds and self._rank == 0 and len(reports) == self._world_size - 1:
            sights = [self._sight, *(Sight.read(line) for line in reports)]
            if guilty := ranks_behind(sights, self._hang_seconds):
                write_hang(self._folder, guilty)
                self.hung = True
        return HUNG if self.hung else None

    def leave_stack(self, heartbeat: Heartbeat) -> None:
        """Tell the other tasks, and have the own rank leave its stack."""
        if self._rank == 0:
            heartbeat.tell_now()
        leave_stacks([self._watched], [self._sight])
