"""Recognize a lack of memory, as reported by Python or torch's allocators, or as counted by the kernel."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# torch says "you tried to allocate 64 bytes" on the CPU, "CUDA out of memory. Tried to allocate 2.00 GiB." on a GPU
ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
OF_LIBRARIES = (
    "can't allocate memory",
    "out of memory",
    "std::bad_alloc",
    "Cannot allocate memory",
)


@dataclass(frozen=True)
class Shortage:
    asked_bytes: int | None  # None if unknown
    peak_bytes: int | None  # the rank's peak so far

    def __str__(self) -> str:
        asked = f" asked for {gib(self.asked_bytes)}," if self.asked_bytes else ""
        peak = f" had at most {gib(self.peak_bytes)} so far" if self.peak_bytes else ""
        return f"out of memory:{asked}{peak}".rstrip(":,")


def describe_shortage(error: BaseException, peak_bytes: int | None) -> Shortage | None:
    """Return the shortage that the error reports; None if it is another error."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    message = str(error)
    is_known = bool(kinds & {"MemoryError", "OutOfMemoryError"})
    is_known |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    is_known |= "RuntimeError" in kinds and any(words in message for words in OF_LIBRARIES)
    if not is_known:
        return None
    asked = ASKED.search(message)
    num_bytes = round(float(asked[1]) * UNITS[asked[2]]) if asked else None
    return Shortage(num_bytes, peak_bytes)


def gib(num_bytes: float) -> str:
    """Format bytes: 1.50 GiB, 12.0 MiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def kills_by_kernel() -> int:
    """Return how many processes the kernel killed for lack of memory, in this control group or else on this machine."""
    for file in _counters():
        if file.exists():
            count = re.search(r"^oom_kill (\d+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if count:
                return int(count[1])
    return 0


def _counters() -> list[Path]:
    """Return the files with counters: of control groups in version 2 and 1, then of the machine."""
    root, files = Path("/sys/fs/cgroup"), [Path("/proc/vmstat")]
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            files.insert(0, root / "memory" / group.lstrip("/") / "memory.oom_control")
        elif not controllers:
            files.insert(0, root / group.lstrip("/") / "memory.events")
    return files
