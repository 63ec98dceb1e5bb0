"""Send a job's steps to an MLflow server while it runs, by a process beside rank 0's task.

    task of rank 0 ── starts ───▶ this file ── reads ──▶ the run's folder
                   ── hangs up ─▶           ── sends ──▶ server

The process is neither a rank nor a thread of one, and it is niced: no step waits for it and no measurement contains it.
The files hold everything, and `zeroexp watch` or `zeroexp sync` can send the remaining steps to the same MLflow run: a
server that is away costs one line in the log.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from zeroexp.config.keys import TrackingConfig, load
from zeroexp.tracking.failure import FAILURE
from zeroexp.tracking.files import SUMMARY

LOG = "mlflow.log"  # beside the logs of the ranks; empty if nothing goes wrong
END_SECONDS = 5  # the sender's time from our hanging up to its end
NICENESS = 19
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 15.0  # between two batches
PAUSE_GROWTH = 1.5


def sends_live(config: TrackingConfig) -> bool:
    """Send live only to a server: a database that many nodes write over a shared file system breaks sooner or later."""
    return config.mlflow and (config.uri or "").startswith(("http://", "https://"))


@contextlib.contextmanager
def sender(folder: Path) -> Iterator[None]:
    """Send the run's steps as they appear in its folder during the block, then the rest within END_SECONDS."""
    with (folder / "logs" / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "zeroexp.tracking.mlflow_live", str(folder)],
            stdin=subprocess.PIPE,  # closes when this process ends for any reason
            stdout=log,
            stderr=log,
        )
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        process.kill()
        process.wait()


def main() -> None:
    """Run the sender: `python -m zeroexp.tracking.mlflow_live <run folder>`."""
    folder = Path(sys.argv[1])
    os.nice(NICENESS)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        # Slurm signals all processes of a job; our task tells us when to end
        signal.signal(number, signal.SIG_IGN)
    # Which the task of rank 0 does not need.
    from zeroexp.process.server_address import without_password
    from zeroexp.tracking.mlflow import MlflowTracker

    tracking = load(folder / "config.yaml").tracking
    tracker = MlflowTracker(tracking.uri, tracking.experiment, folder.parents[1])
    pause, is_over, has_warned = FIRST_PAUSE_SECONDS, False, False
    while True:
        try:
            tracker.log_run(folder, _end_of(folder) if is_over else "running")
        except Exception as error:  # a server or the network may raise anything
            if not has_warned:
                first = without_password(str(error).partition("\n")[0])
                print(f"MLflow does not take the steps now ({type(error).__name__}: {first})")
            has_warned = True
        if is_over:
            return
        is_over = bool(select.select([sys.stdin], [], [], pause)[0])  # our task has hung up
        pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE_SECONDS)


def _end_of(folder: Path) -> str:
    """Return how the run ended; of any other end than a good one `zeroexp watch` or `zeroexp sync` tells."""
    finished = (folder / SUMMARY).exists() and not (folder / FAILURE).exists()
    return "done" if finished else "running"


if __name__ == "__main__":
    main()
