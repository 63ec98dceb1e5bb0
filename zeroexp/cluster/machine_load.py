"""Load of the machine by other programs while a run was measured, from the kernel's own counts.

The machine's busy CPU seconds, less those of this process and of the server with its ranks, are everybody else's. The
kernel adds a process to its parent's count when it has ended, so the difference is taken after the ranks have ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeroexp.tracking.files import write_json
from zeroexp.tracking.run import LOAD_FILE

IDLE_FIELDS = (3, 4)  # idle and iowait, of the first line of /proc/stat
GUEST_FIELD = 8  # guests' time is in user time already
# User, system, and both of children, behind the name in /proc/<pid>/stat.
CPU_FIELDS = slice(11, 15)


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
        stat = Path(f"/proc/{server}/stat").read_text(encoding="utf-8")
        busy = busy_seconds()
    except OSError:
        return None
    ours = sum(int(word) for word in stat.rpartition(")")[2].split()[CPU_FIELDS])
    return busy - ours / os.sysconf("SC_CLK_TCK") - time.process_time()


def busy_seconds() -> float:
    """Return the seconds that all cores together have worked since the machine started."""
    first = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
    ticks = [int(word) for word in first.split()[1:]]
    busy = sum(ticks[:GUEST_FIELD]) - sum(ticks[field] for field in IDLE_FIELDS)
    return busy / os.sysconf("SC_CLK_TCK")
