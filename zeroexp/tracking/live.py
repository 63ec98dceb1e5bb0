"""Send a job's steps to an MLflow server while it runs, by a process beside rank 0's task.

    task of rank 0 ── starts ───▶ sender.py ── reads ──▶ records.jsonl
                   ── hangs up ─▶           ── sends ──▶ server

The process is neither a rank nor a thread of one, and it is niced: no step waits for it and no measurement contains it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from zeroexp.config.keys import TrackingConfig

LOG = "mlflow.log"  # beside the logs of the ranks; empty if nothing goes wrong
END_SECONDS = 5  # the sender's time from our hanging up to its end


def sends_live(config: TrackingConfig) -> bool:
    """Send live only to a server: a database that many nodes write over a shared file system breaks sooner or later."""
    return config.mlflow and (config.uri or "").startswith(("http://", "https://"))


@contextlib.contextmanager
def sender(folder: Path) -> Iterator[None]:
    """Send the run's steps as they appear in its folder during the block, then the rest within END_SECONDS."""
    with (folder / "logs" / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "zeroexp.tracking.sender", str(folder), str(END_SECONDS)],
            stdin=subprocess.PIPE,  # closes when this process ends for any reason
            stdout=log,
            stderr=log,
        )
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(2 * END_SECONDS)  # it ends by itself, unless somebody stopped it
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
