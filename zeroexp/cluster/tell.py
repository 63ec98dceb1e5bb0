"""Tell of a run that did not end well: one line to the command of events.tell.

Whoever sees an end and writes it into the run's state tells of it, so that each is told once: the sweep itself, or for
jobs that outlive it `zeroexp watch` and `zeroexp sync`.
"""

from __future__ import annotations

import subprocess
import sys

from zeroexp.cluster.job import Job
from zeroexp.cluster.slurm_state import CANCELLED_IN_SLURM
from zeroexp.tracking.run import UNFINISHED

TELL_SECONDS = 60.0


def tell(job: Job) -> None:
    """Hand a line about a run that did not end well to the command of events.tell."""
    state = job.state
    reason = " ".join((state["reason"] or "").split())  # of an exception it may be several lines
    ours = state["status"] == "cancelled" and not reason.startswith(CANCELLED_IN_SLURM)
    if not reason or ours or state["status"] in (*UNFINISHED, "skipped"):
        return
    if not (command := job.config.events.tell):
        return
    line = f"{job.folder}: {state['status']}: {reason}\n"
    try:
        subprocess.run(command, shell=True, check=True, input=line.encode(), timeout=TELL_SECONDS)
    except subprocess.SubprocessError as error:
        print(f"zeroexp: events.tell: {error}", file=sys.stderr)
