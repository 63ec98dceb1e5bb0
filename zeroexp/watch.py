"""`zeroexp watch outputs/<sweep>`: show the state of a sweep on Slurm, live and at any time.

    zeroexp watch outputs/<sweep>                  follow it to its end; Ctrl-C leaves the jobs alone
    zeroexp watch outputs/<sweep> --once           show it as it is now
    zeroexp watch outputs/<sweep> --cancel         cancel all that has not ended
    zeroexp watch outputs/<sweep> --json           and say it to programs, as `zeroexp report --json -` does

Exit codes: 0 nothing has failed, 1 something has, 2 no such sweep.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from zeroexp.cluster.follow import cancel, follow, refresh_if_slurm_answers, unfinished
from zeroexp.cluster.job import Job
from zeroexp.cluster.submit import awaits_sbatch, is_held_back, slurm_id
from zeroexp.config.keys import ConfigError
from zeroexp.process import signals
from zeroexp.process.json_output import answer, parser_of
from zeroexp.report.exports import runs_as_json
from zeroexp.report.measured_points import points_of
from zeroexp.report.reading import readable_runs
from zeroexp.report.results_table import print_table
from zeroexp.report.sweep_progress import SweepProgress
from zeroexp.sync import jobs_of, sync
from zeroexp.tracking import sweep_owner
from zeroexp.tracking.mlflow_upload_thread import UploadsOfSweep
from zeroexp.tracking.run import FINE, UNFINISHED

EVERYTHING_FINE, SOMETHING_FAILED = 0, 1
SECONDS_BETWEEN_LOOKS = 2.0  # at what another process is to submit


def main() -> int:
    signals.handle_ctrl_c()  # which the console script ends at once else
    return answer(_watch)


def _watch(told: list[str] | None) -> int:
    arguments = parse_arguments()
    try:
        code = watch(arguments)
    except PermissionError as error:
        remedy = "watch as the user who submitted the sweep"
        raise ConfigError(f"{error.filename}: {error.strerror}; {remedy}") from error
    except KeyboardInterrupt:
        print("left; the jobs go on", file=sys.stderr)
        code = EVERYTHING_FINE
    if told is not None:
        told.append(runs_as_json(readable_runs(job.folder for job in jobs_of(arguments.sweep))))
    return code


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--once", action="store_true", help="do not follow")
    action.add_argument("--cancel", action="store_true", help="cancel what has not ended")
    arguments = parser.parse_args()
    arguments.sweep = arguments.sweep.resolve()
    return arguments


def watch(arguments: argparse.Namespace) -> int:
    jobs = jobs_of(arguments.sweep)
    if not arguments.cancel:
        refresh_if_slurm_answers(jobs)
    else:
        for job in cancel(jobs, "cancelled by watch --cancel"):
            job_id = slurm_id(job)
            print(f"cancelled {job.name} ({f'Slurm job {job_id}' if job_id else 'not submitted'})")
    uploads = UploadsOfSweep()
    if not (arguments.cancel or arguments.once):
        # A controller that is silent is waited for.
        if (unfinished(jobs) or any(map(awaits_sbatch, jobs))) and not shutil.which("squeue"):
            remedy = "watch on a machine of the cluster, or show the last look with --once"
            raise ConfigError(f"squeue: not on this machine; {remedy}")
        try:
            follow_all(jobs, uploads)
        finally:
            sweep_owner.release_ownership(arguments.sweep)
    runs = readable_runs(job.folder for job in jobs)
    points = points_of(runs)
    print_table(points)
    if not unfinished(jobs) and any(run.summary for run in runs):
        from zeroexp.report import page  # plotly and scipy take a second to import

        page.write_into(arguments.sweep, points)
    sync(jobs, uploads)
    failed = [job for job in jobs if job.status not in (*FINE, *UNFINISHED)]
    if not (arguments.cancel or arguments.once):
        failed += filter(awaits_sbatch, jobs)
    return SOMETHING_FAILED if failed or len(runs) < len(jobs) else EVERYTHING_FINE


def follow_all(jobs: list[Job], uploads: UploadsOfSweep) -> None:
    """Follow to its end what Slurm has, and what this process, or another one that lives, is to submit."""
    told = False
    while True:
        ours, problem = to_follow(jobs)
        waiting = ", ".join(job.name for job in jobs if awaits_sbatch(job))
        if problem and waiting and not told:
            print(f"zeroexp: another process is to submit {waiting}: {problem}", file=sys.stderr)
            told = True
        if ours:
            with SweepProgress(len(jobs)) as progress:
                follow(
                    {n: job for n, job in enumerate(jobs, start=1) if job in ours},
                    progress,
                    on_step=uploads.look,
                    on_end=uploads.send,
                )
        elif isinstance(problem, sweep_owner.OwnerLives):
            time.sleep(SECONDS_BETWEEN_LOOKS)
            refresh_if_slurm_answers(jobs)  # the owner may have died
        else:
            return


def to_follow(jobs: list[Job]) -> tuple[list[Job], ConfigError | None]:
    """Return the jobs that Slurm has and those that this process submits now, or why another one submits them."""
    waiting, problem = [job for job in jobs if awaits_sbatch(job)], None
    try:
        if waiting:
            sweep_owner.take_ownership(jobs[0].folder.parent)
    except ConfigError as error:
        waiting, problem = [], error
    return [*unfinished(jobs).values(), *filter(is_held_back, waiting)], problem


if __name__ == "__main__":
    sys.exit(main())
