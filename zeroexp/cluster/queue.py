"""The points of a sweep that Slurm runs: they are all submitted at once, then followed until they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from zeroexp.cluster.follow import cancel, follow, slurm_id
from zeroexp.cluster.job import Job
from zeroexp.config import ConfigError
from zeroexp.report.progress import Progress
from zeroexp.tracking.run import UNFINISHED

if TYPE_CHECKING:
    from zeroexp.cluster.slurm import SlurmCluster

STOPPED = "the sweep was stopped"


class Queue:
    def __init__(self) -> None:
        self._clusters: dict[str, SlurmCluster] = {}

    def submit(self, job: Job) -> None:
        """Submit a point to Slurm; a refused one counts as failed, and a dry run is printed and skipped."""
        config = job.config.cluster
        cluster = self._cluster(job)
        if config.dry_run:
            print(cluster.script(job))
            job.enter("skipped", "cluster.dry_run=true")
            return
        try:
            cluster.submit(job)
        except ConfigError as error:
            job.enter("failed", str(error))

    def follow(
        self,
        jobs: dict[int, Job],
        progress: Progress,
        *,
        on_step: Callable[[Job], None],
        on_end: Callable[[Job], None],
    ) -> None:
        """Return when all jobs with cluster.wait have ended; keys are the points' numbers in `progress`."""
        waited_for: dict[int, Job] = {}
        for number, job in jobs.items():
            if job.state["status"] != "pending":
                progress.end(number, job.state["status"], job.state["reason"], job.name)
                on_end(job)
            elif job.config.cluster.wait:
                waited_for[number] = job
            else:
                progress.note(f"{job.name}: Slurm job {slurm_id(job)}")
        follow(waited_for, progress, on_step=on_step, on_end=on_end)

    def _cluster(self, job: Job) -> SlurmCluster:
        """Return the config's cluster, kept because it counts its jobs; the local import saves others 0.15 s."""
        from zeroexp.cluster.slurm import SlurmCluster

        config = job.config.cluster
        return self._clusters.setdefault(repr(config), SlurmCluster(config))


def stop(jobs: Iterable[Job]) -> list[Job]:
    """End and return the unfinished jobs, except jobs in Slurm with cluster.wait=false."""
    stopped = [job for job in jobs if slurm_id(job) is None or job.config.cluster.wait]
    stopped = [job for job in stopped if job.state["status"] in UNFINISHED]
    in_slurm = cancel(stopped, STOPPED)
    for job in stopped:
        if job not in in_slurm:
            job.enter("cancelled", STOPPED)
    return stopped
