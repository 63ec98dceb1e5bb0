"""This file tells how long a process has done nothing: no CPU time, no bytes read or written, no page fetched.

Before the first step there is no other measure: imports, weights and data may take any time, as long as they work.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# Threads that only wait for a message wake now and then. A process that works uses far more than this share of a CPU.
SHARE_OF_WAITING = 0.01
# Fields of `man proc`, "stat", that follow the process name.
MAJOR_FAULTS, USER_TICKS, SYSTEM_TICKS = 9, 11, 12
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Idle:
    """`look` returns the seconds for which this process has done nothing."""

    def __init__(self, pid: int) -> None:
        self._pid, self._ticks, self._moved = pid, 0, ""
        self._seconds = self._since_tick = 0.0

    def look(self, seconds: float) -> float:
        """`seconds` have passed since the last look."""
        state, ticks, moved = self._now()
        self._since_tick += seconds
        computed = ticks - self._ticks > SHARE_OF_WAITING * self._since_tick * TICKS_PER_SECOND
        if state == "R" or computed or moved != self._moved:
            self._seconds = self._since_tick = 0.0
            self._ticks, self._moved = ticks, moved
        else:
            self._seconds += seconds
        return self._seconds

    def _now(self) -> tuple[str, int, str]:
        with suppress(OSError):  # it has ended
            stat = (
                Path(f"/proc/{self._pid}/stat")
                .read_text(encoding="utf-8")
                .rpartition(")")[2]
                .split()
            )
            ticks = int(stat[USER_TICKS]) + int(stat[SYSTEM_TICKS])
            return stat[0], ticks, stat[MAJOR_FAULTS] + self._bytes_moved()
        return "Z", 0, ""

    def _bytes_moved(self) -> str:
        try:
            return Path(f"/proc/{self._pid}/io").read_text(encoding="utf-8")
        except OSError:  # some sites show it to nobody
            return ""
