"""owner.json in a sweep's folder names the process that runs its points on this machine, while that process lives.

A process that is killed leaves the file behind. Readers of a point with the status running find out here that nobody
runs it, and `--rerun` takes the sweep over. Only the owner's own host can know this, since its processes are invisible
elsewhere. Points that Slurm runs need no owner.
"""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from zeroexp.config import ConfigError
from zeroexp.tracking.json_files import read_json, write_json

OWNER = "owner.json"


@dataclass(frozen=True)
class Owner:
    host: str
    pid: int
    started: str | None  # start time, which distinguishes processes that reuse a pid

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def of_this_process(cls) -> Owner:
        return cls(socket.gethostname(), os.getpid(), _start_of(os.getpid()))

    @classmethod
    def of(cls, sweep: Path) -> Owner | None:
        content = read_json(sweep / OWNER)
        return None if content is None else cls(**content)

    def is_gone(self) -> bool:
        """Tell whether the process is known to be dead."""
        if self.host != socket.gethostname():
            return False
        return not _is_alive(self.pid) or _start_of(self.pid) != self.started


def take_ownership(sweep: Path) -> None:
    """Make this process the owner. Raises ConfigError if another owner may still be alive."""
    with (sweep / f".{OWNER}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # serializes two processes that both find a dead owner
        owner, me = Owner.of(sweep), Owner.of_this_process()
        if owner not in (None, me) and not owner.is_gone():
            remedy = "wait for it or end it"
            if owner.host != me.host:
                remedy += f"; if that machine is gone, remove {sweep / OWNER}"
            raise ConfigError(f"{sweep}: {owner} runs its points; {remedy}")
        write_json(sweep / OWNER, asdict(me))


def release_ownership(sweep: Path) -> None:
    if Owner.of(sweep) == Owner.of_this_process():
        (sweep / OWNER).unlink()


def is_abandoned(run: Path) -> str | None:
    """Return a message if the process that was to run this point is known to be dead; else None."""
    owner = Owner.of(run.parent)
    return f"{owner}, which ran it, has died" if owner and owner.is_gone() else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process, so it lives
        return True
    return True


def _start_of(pid: int) -> str | None:
    """Return the clock ticks from boot to the start of a process; None if the system has no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    after_name = stat.rpartition(")")[2].split()  # the name may contain spaces and brackets
    state, started = after_name[0], after_name[19]
    return None if state == "Z" else started
