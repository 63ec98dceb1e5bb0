"""owner.json in a sweep's folder: which process runs its points on this machine, there as long as that process lives.

A process that is killed leaves it behind. Whoever reads a point that is said to run finds out here that nobody runs
it, and `--rerun` takes the sweep over. Only the owner's own host can know: elsewhere its processes can not be seen.
Points that Slurm runs need no owner.
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
    started: str | None  # tells a process from a later one with the same pid

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def me(cls) -> Owner:
        return cls(socket.gethostname(), os.getpid(), _start_of(os.getpid()))

    @classmethod
    def of(cls, sweep: Path) -> Owner | None:
        content = read_json(sweep / OWNER)
        return None if content is None else cls(**content)

    def gone(self) -> bool:
        """True if the process is known to be dead."""
        if self.host != socket.gethostname():
            return False
        return not _alive(self.pid) or _start_of(self.pid) != self.started


def take(sweep: Path) -> None:
    """Make this process the owner. Raises ConfigError where another one may still be alive."""
    with (sweep / f".{OWNER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two that find a dead owner, one comes first
        owner, me = Owner.of(sweep), Owner.me()
        if owner not in (None, me) and not owner.gone():
            remedy = "wait for it or end it"
            if owner.host != me.host:
                remedy += f"; if that machine is gone, remove {sweep / OWNER}"
            raise ConfigError(f"{sweep}: {owner} runs its points; {remedy}")
        write_json(sweep / OWNER, asdict(me))


def release(sweep: Path) -> None:
    if Owner.of(sweep) == Owner.me():
        (sweep / OWNER).unlink()


def abandoned(run: Path) -> str | None:
    """In words, if the process that was to run this point is known to be dead."""
    owner = Owner.of(run.parent)
    return f"{owner}, which ran it, has died" if owner and owner.gone() else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user, so it lives
        return True
    return True


def _start_of(pid: int) -> str | None:
    """Clock ticks from boot to the start of a process; None where the system has no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None
    after_name = stat.rpartition(")")[2].split()  # the name may hold spaces and brackets
    state, started = after_name[0], after_name[19]
    return None if state == "Z" else started
