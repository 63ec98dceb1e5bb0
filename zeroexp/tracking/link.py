"""mlflow.json in a run folder: which MLflow run it became, and which process answers for it while it lasts."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from zeroexp.tracking.files import read_json, write_json

LINK = "mlflow.json"


@dataclass(frozen=True)
class Link:
    uri: str
    experiment_id: str
    run_id: str
    host: str
    pid: int | None  # None: no process on this host answers for the run (a Slurm job)
    process_started: str | None  # tells a process from a later one with the same pid
    attempt: int  # a run that is run again from its start is another run in MLflow
    closed: bool = False  # MLflow knows how the run ended

    @classmethod
    def to(
        cls, uri: str, experiment_id: str, run_id: str, pid: int | None, attempt: int = 0
    ) -> Link:
        started = None if pid is None else _start_of(pid)
        return cls(uri, experiment_id, run_id, socket.gethostname(), pid, started, attempt)

    @classmethod
    def read(cls, folder: Path) -> Link | None:
        content = read_json(folder / LINK)
        return None if content is None else cls(**content)

    def write(self, folder: Path) -> None:
        write_json(folder / LINK, asdict(self))

    def orphaned(self) -> bool:
        """True if the process that answers for the run is known to be gone; only its own host can know."""
        if self.pid is None or self.host != socket.gethostname():
            return False
        return not _alive(self.pid) or _start_of(self.pid) != self.process_started


def attempt_of(folder: Path) -> int:
    """How often the run was run before: what those attempts left was moved to earlier/<number>/."""
    return sum(1 for _ in (folder / "earlier").glob("*"))


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
