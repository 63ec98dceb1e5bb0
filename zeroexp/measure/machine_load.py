"""Load of the machine by other programs while something was measured, from the kernel's own counts.

The machine's busy CPU seconds, less those of this process and of the parent of the ranks, are everybody else's. The
kernel adds a process to its parent's count when it has ended, so the difference is taken after the ranks have ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil


def begin_load(parent: int) -> Callable[[], float | None]:
    """Return a function that tells how many cores others used since this call, None where the kernel does not say.

    parent: the pid of the ranks' parent.
    """
    began, before = time.monotonic(), _seconds_of_others(parent)

    def other_cores() -> float | None:
        after, seconds = _seconds_of_others(parent), time.monotonic() - began
        if before is None or after is None:
            return None
        return max(0.0, after - before) / seconds

    return other_cores


def _seconds_of_others(parent: int) -> float | None:
    try:
        ours = sum(psutil.Process(parent).cpu_times()[:4])  # user, system, and both of children
        ours += time.process_time() if parent != os.getpid() else 0.0
        return busy_seconds() - ours
    except (OSError, psutil.Error):
        return None


def busy_seconds() -> float:
    """Return the seconds that all cores together have worked since the machine started."""
    times = psutil.cpu_times()
    return sum(times[:8]) - times.idle - times.iowait  # guests' time is in user time already
