"""One task of a Slurm job: starts the rank as its child, and writes down how it died if it could not itself.

Slurm says that a task was killed, not why or as which rank's first cause, and only to who reads srun's output. The
parent sees its child's exit status at once and on the same node, so a rank killed by the system is named with rank
and host, over what its peers say when they lose it. The parent imports next to nothing: it lives beside every rank.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

from zeroexp.cluster.heartbeat import Heartbeat
from zeroexp.cluster.live import sender
from zeroexp.tracking import failure

HEARTBEAT_AT = "ZEROEXP_HEARTBEAT"  # host:port of the task of rank 0
SECONDS_BETWEEN_SIGNALS = 1.0  # Slurm's, from a task's child to the task
SIGNALLED = 128  # exit codes of shells: this plus the signal


def run_task(
    folder: Path, rank_main: str, device: str, heartbeat_s: float, sends: bool = False
) -> None:
    """Run one rank to its end, or until a task of another is lost. Raises SystemExit with its exit code.

    `rank_main` is module:function, called with (folder, device=...); `sends`: rank 0's task tells MLflow.
    """
    ending = _Ending()
    # Slurm's own numbers: world.py, which knows them too, imports torch.
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    # Of its own interpreter: this one has submitit's signal handlers.
    command = [sys.executable, "-u", "-m", "zeroexp.cluster.task", rank_main, str(folder), device]
    log = failure.log_path(folder, rank)
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as output:  # also what goes wrong before the rank opens its log itself
        child = subprocess.Popen(command, stdout=output, stderr=output)
    beside = sender(folder) if sends and rank == 0 else nullcontext()
    with beside, Heartbeat(rank, world_size, os.environ[HEARTBEAT_AT], heartbeat_s) as heartbeat:
        lost = heartbeat.wait(child.pid)
        if lost:
            failure.write_unranked(folder, "TaskLost", lost, over=not ending.asked)
            child.kill()
        status = child.wait()
        if status == -signal.SIGTERM:
            ending.wait()
        if status and not lost and not ending.asked:
            failure.write_died(folder, rank, status)
    raise SystemExit(status if status >= 0 else SIGNALLED - status)


class _Ending:
    """Whether Slurm asked the job to end: its signals go to parent and child alike, and are nobody's fault."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._note)
        # submitit has Slurm announce the time limit by this signal; the limit itself follows.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def wait(self) -> None:
        """Slurm signals one process after the other: the child may have died of it before this one hears."""
        until = time.monotonic() + SECONDS_BETWEEN_SIGNALS
        while not self.asked and time.monotonic() < until:
            time.sleep(0.01)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def main() -> None:
    """The child: `python -m zeroexp.cluster.task <module:function> <folder> <device>`"""
    rank_main, folder, device = sys.argv[1:]
    module, _, function = rank_main.partition(":")
    getattr(importlib.import_module(module), function)(Path(folder), device=device)


if __name__ == "__main__":
    main()
