"""`zeroexp sync outputs/<sweep>`: send MLflow what the folders of a sweep's runs hold.

Compute nodes only write files. Any machine that reaches those files and the store can send them. Sending again changes
nothing, so it may run at any time, by cron too. Exit codes: 0 sent, 1 the store did not take it, 2 no such sweep.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from zeroexp.cluster.follow import refresh
from zeroexp.cluster.job import Job
from zeroexp.config.keys import ConfigError
from zeroexp.process import safe_output
from zeroexp.process.json_output import json_alone, wants_json
from zeroexp.tracking.json_files import dumps
from zeroexp.tracking.uploads import Uploads


def main() -> int:
    safe_output.keep_going()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sweep", type=Path, help="folder of the sweep; --json: the answer for programs"
    )
    wanted = wants_json()
    folder = parser.parse_args().sweep.resolve()
    with json_alone(wanted) as told:
        code = _send(folder)
        told.append(dumps({"sweep": str(folder), "sent": code == 0}))
    return code


def _send(folder: Path) -> int:
    jobs = [Job(path.parent) for path in sorted(folder.glob("*/config.yaml"))]
    try:
        if not jobs:
            raise ConfigError(f"{folder}: no run in there; give a sweep's folder, outputs/<sweep>")
        refresh(jobs)
        return 0 if sync(jobs, open_uploads(jobs)) else 1
    except ConfigError as error:
        print(f"zeroexp: {error}", file=sys.stderr)
        return 2


def open_uploads(jobs: Iterable[Job]) -> Uploads | None:
    """Return the uploads to the store of a sweep's runs; None where MLflow tracks no run of it."""
    for job in jobs:
        tracking = job.config.tracking
        if tracking.mlflow and job.status != "skipped":
            return Uploads(tracking, job.folder.parents[1], job.folder.parent.name)
    return None


def sync(jobs: Sequence[Job], uploads: Uploads | None) -> bool:
    """Send every run that is tracked; return False if the store failed."""
    if uploads is None:
        return True
    for job in jobs:
        if job.config.tracking.mlflow and job.status != "skipped":
            uploads.send(job.folder)
    uploads.conclude(jobs[0].folder.parent)
    return not uploads.failed


if __name__ == "__main__":
    sys.exit(main())
