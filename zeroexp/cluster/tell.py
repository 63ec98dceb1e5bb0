"""Tell of a run that did not end well: one line to the command of events.tell.

Whoever sees an end and writes it into the run's state tells of it, so that each is told once: the sweep itself, or for
jobs that outlive it `zeroexp watch` and `zeroexp sync`.
"""

from __future__ import annotations

import subprocess
import sys

from zeroexp.cluster.job import Job
from zeroexp.tracking.run import UNFINISHED

TELL_SECONDS = 60.0


def tell(job: Job) -> None:
    """Hand a line about a run that did not end well to the command of events.tell."""
    state, quiet = job.state, (*UNFINISHED, "cancelled", "skipped")
    if not state["reason"] or state["status"] in quiet:
        return
    if not (command := job.config.events.tell):
        return
    reason = " ".join(state["reason"].split())  # of an exception it may be several lines
    line = f"{job.folder}: {state['status']}: {reason}\n"
    try:
        subprocess.run(command, shell=True, check=True, input=line.encode(), timeout=TELL_SECONDS)
    except subprocess.SubprocessError as error:
        print(f"zeroexp: events.tell: {error}", file=sys.stderr)
