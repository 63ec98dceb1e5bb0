"""A job's own line to an MLflow server: a process beside rank 0's task that sends the run's steps while it goes on.

    task of rank 0 ── starts ───▶ sender.py ── reads ──▶ records.jsonl
                   ── hangs up ─▶           ── sends ──▶ server

It is neither a rank nor a thread of one, and niced: no step waits for it and no measurement contains it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from zeroexp.config import TrackingConfig

LOG = "mlflow.log"  # beside those of the ranks; empty while all is well
END_SECONDS = 5  # what it may take from our hanging up to its end


def sends_live(config: TrackingConfig) -> bool:
    """Only to a server: a database that many nodes write over a shared file system breaks sooner or later."""
    return config.mlflow and (config.uri or "").startswith(("http://", "https://"))


@contextlib.contextmanager
def sender(folder: Path) -> Iterator[None]:
    """Within the block, the run's steps are sent as they appear in its folder; then what is left, and no longer."""
    with (folder / "logs" / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "zeroexp.cluster.sender", str(folder), str(END_SECONDS)],
            stdin=subprocess.PIPE,  # closes with us, however we end
            stdout=log,
            stderr=log,
        )
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(2 * END_SECONDS)  # it ends itself, unless somebody stopped it
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
