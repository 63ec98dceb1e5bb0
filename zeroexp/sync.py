"""`zeroexp sync outputs/<sweep>`: send MLflow what the folders of a sweep's runs hold.

Compute nodes only write files. Any machine that reaches those files and the store can send them. Sending again changes
nothing, so it may run at any time, by cron too. Exit codes: 0 sent, 1 the store did not take it, 2 no such sweep, or
none that MLflow tracks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zeroexp.cluster.follow import refresh_if_slurm_answers
from zeroexp.cluster.job import Job
from zeroexp.config.keys import ConfigError
from zeroexp.process.json_output import answer, parser_of
from zeroexp.tracking.json_files import dumps
from zeroexp.tracking.mlflow_upload_thread import UploadsOfSweep
from zeroexp.tracking.run import run_folders


def main() -> int:
    return answer(_sync)


def _sync(told: list[str] | None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "sweep", type=Path, help="folder of the sweep; --json: the answer for programs"
    )
    sweep = parser.parse_args().sweep.resolve()
    jobs = jobs_of(sweep)
    refresh_if_slurm_answers(jobs)
    uploads = UploadsOfSweep()
    sent = sync(jobs, uploads)
    if not uploads.num_stores:
        problem = "MLflow tracks none of its runs (tracking.mlflow=false, or all were skipped)"
        raise ConfigError(f"{sweep}: {problem}; run it with tracking=mlflow")
    if told is not None:
        told.append(dumps({"sweep": str(sweep), "sent": sent}))
    return 0 if sent else 1


def jobs_of(sweep: Path) -> list[Job]:
    """Return the jobs of a sweep in the order in which they were submitted. Raises ConfigError if there are none."""
    jobs = [Job(run) for run in run_folders(sweep)]
    if not jobs:
        raise ConfigError(f"{sweep}: no run in there; give the folder of a sweep, outputs/<sweep>")
    return sorted(jobs, key=lambda job: (job.state.get("pending_at", 0.0), job.name))


def sync(jobs: Sequence[Job], uploads: UploadsOfSweep) -> bool:
    """Send every run that is tracked; return False if a store failed."""
    for job in jobs:
        uploads.send(job.folder)
    uploads.conclude(jobs[0].folder.parent)
    return not uploads.failed


if __name__ == "__main__":
    sys.exit(main())
