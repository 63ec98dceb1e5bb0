"""Load of the machine by other programs while a run was measured, from the kernel's own counts.

The machine's busy CPU seconds, less those of this process and of the server with its ranks, are everybody else's. The
kernel adds a process to its parent's count when it has ended, so the difference is taken after the ranks have ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from zeroexp.tracking.files import write_json
from zeroexp.tracking.run import LOAD_FILE


@contextmanager
def measured_load(folder: Path, server: int) -> Iterator[None]:
    """Write the mean number of cores that others used during the block; nothing where the kernel does not say.

    server: the process whose children the ranks are.
    """
    began, before = time.monotonic(), _seconds_of_others(server)
    yield
    after, seconds = _seconds_of_others(server), time.monotonic() - began
    if before is not None and after is not None:
        load = {"seconds": seconds, "other_cores": max(0.0, after - before) / seconds}
        write_json(folder / LOAD_FILE, load)


def _seconds_of_others(server: int) -> float | None:
    try:
        ours = sum(psutil.Process(server).cpu_times()[:4])  # user, system, and both of children
        return busy_seconds() - ours - time.process_time()
    except (OSError, psutil.Error):
        return None


def busy_seconds() -> float:
    """Return the seconds that all cores together have worked since the machine started."""
    times = psutil.cpu_times()
    return sum(times[:8]) - times.idle - times.iowait  # guests' time is in user time already
