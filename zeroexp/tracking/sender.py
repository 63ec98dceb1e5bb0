"""`python -m zeroexp.tracking.sender <run folder> <seconds>`: live.py starts this on the first node of a job.

It sends the run to its MLflow server until standard input closes, then the rest for at most that many seconds. The
files hold everything, and zeroexp.watch or zeroexp.sync can send the remaining steps to the same MLflow run: a server
that is away costs one line in the log.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from zeroexp.config.keys import load
from zeroexp.measure.record import StepRecord
from zeroexp.process.reachable import without_password
from zeroexp.tracking.failure import FAILURE
from zeroexp.tracking.files import RECORDS, SUMMARY, read_rows, step_record
from zeroexp.tracking.follow_file import Tail
from zeroexp.tracking.mlflow import MlflowTracker

NICENESS = 19
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 15.0  # between two batches
PAUSE_GROWTH = 1.5


class Sender:
    def __init__(self, folder: Path) -> None:
        tracking = load(folder / "config.yaml").tracking
        self._folder = folder
        self._tracker = MlflowTracker(tracking.uri, tracking.experiment, folder.parents[1])
        self._tail = Tail(folder / RECORDS)
        self._unsent: list[tuple[float, StepRecord]] = []
        self._run_id: str | None = None
        self._warned = False

    def send(self) -> None:
        self._try(self._send_steps)

    def finish(self) -> None:
        """Send the rest, and close the run if it finished; zeroexp.watch and zeroexp.sync close it after any other
        end.
        """
        self._try(self._send_steps)
        if (self._folder / SUMMARY).exists() and not (self._folder / FAILURE).exists():
            self._try(lambda: self._tracker.log_run(self._folder, "done"))

    def _send_steps(self) -> None:
        rows = read_rows(self._tail.new_lines())
        self._unsent += [(row["written_at"], step_record(row)) for row in rows]
        if self._run_id is None:  # this sends params and tags too
            self._run_id = self._tracker.log_run(self._folder, "running")
            assert self._run_id is not None, "a skipped point has no job"
        self._tracker.log_steps(self._run_id, self._unsent)
        self._unsent = []

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # a server or the network may raise anything
            if not self._warned:
                first = without_password(str(error).partition("\n")[0])
                print(f"MLflow does not take the steps now ({type(error).__name__}: {first})")
            self._warned = True


def main() -> None:
    folder, end_seconds = Path(sys.argv[1]), int(sys.argv[2])
    os.nice(NICENESS)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        # Slurm signals all processes of a job; our task tells us when to end
        signal.signal(number, signal.SIG_IGN)
    over = threading.Event()
    threading.Thread(target=_await_the_end, args=(over, end_seconds), daemon=True).start()
    sender, pause = Sender(folder), FIRST_PAUSE_SECONDS
    sender.send()
    while not over.wait(pause):
        sender.send()
        pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE_SECONDS)
    sender.finish()


def _await_the_end(over: threading.Event, end_seconds: int) -> None:
    """Wait until the task hangs up; from then on this process ends within `end_seconds`, whatever the network does."""
    os.read(0, 1)
    signal.alarm(end_seconds)
    over.set()


if __name__ == "__main__":
    main()
