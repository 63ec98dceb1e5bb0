"""This file counts how busy other programs kept the machine while a run was measured, from the kernel's own counts.

The machine's busy CPU seconds, less those of this process and of the server with its ranks, are everybody else's. The
kernel adds a process to its parent's count when it has ended, so the difference is taken after the ranks have ended.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from zeroexp.tracking.files import write_json
from zeroexp.tracking.run import LOAD_FILE

IDLE_FIELDS = (3, 4)  # idle and iowait, of the first line of /proc/stat
GUEST_FIELD = 8  # guests' time is in user time already
# User, system, and both of children, behind the name in /proc/<pid>/stat.
CPU_FIELDS = slice(11, 15)


class Load:
    """Made before a run; `write` after it. `server` is the process whose children the ranks are."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._began, self._others = time.monotonic(), self._others_seconds()

    def write(self, folder: Path) -> None:
        """Write the mean number of cores that others used; nothing where the kernel does not tell."""
        others = self._others_seconds()
        if others is None or self._others is None:
            return
        seconds = time.monotonic() - self._began
        told: dict[str, Any] = {
            "seconds": seconds,
            "other_cores": max(0.0, others - self._others) / seconds,
        }
        write_json(folder / LOAD_FILE, told)

    def _others_seconds(self) -> float | None:
        try:
            stat = Path(f"/proc/{self._server}/stat").read_text(encoding="utf-8")
            first = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
        except OSError:
            return None
        ticks = [int(word) for word in first.split()[1:]]
        busy = sum(ticks[:GUEST_FIELD]) - sum(ticks[field] for field in IDLE_FIELDS)
        ours = sum(int(word) for word in stat.rpartition(")")[2].split()[CPU_FIELDS])
        return (busy - ours) / os.sysconf("SC_CLK_TCK") - time.process_time()
