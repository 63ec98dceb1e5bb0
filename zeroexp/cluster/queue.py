"""The points of a sweep that Slurm runs: they are all submitted at once, then followed until they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from zeroexp.cluster.follow import cancel, follow, slurm_id
from zeroexp.cluster.job import Job
from zeroexp.cluster.slurm_state import SlurmSilent
from zeroexp.cluster.submit import SUBMITTING, Later
from zeroexp.config.keys import ConfigError
from zeroexp.report.sweep_progress import Progress
from zeroexp.tracking.files import write_json
from zeroexp.tracking.run import HELD_FILE, UNFINISHED

if TYPE_CHECKING:
    from zeroexp.cluster.slurm import SlurmCluster

STOPPED = "the sweep was stopped"


class Queue:
    def __init__(self) -> None:
        self._clusters: dict[str, SlurmCluster] = {}
        self._full = False  # Slurm has refused a point for now, and so do we those behind it

    def submit_all(self, jobs: Iterable[Job]) -> None:
        """Submit points to Slurm, those of one shape as a job array where cluster.slurm.array asks for it."""
        groups: dict[tuple[str, int], list[Job]] = {}
        for job in jobs:
            config = job.config
            if config.cluster.slurm.array:
                groups.setdefault((repr(config.cluster), config.world_size), []).append(job)
            else:
                self.submit(job)
        for group in groups.values():
            self._submit_array(group)

    def _submit_array(self, jobs: Sequence[Job]) -> None:
        """Submit points of one shape together; those that are too many for Slurm now, one by one."""
        cluster, dry_run = self._cluster(jobs[0]), jobs[0].config.cluster.dry_run
        if dry_run:
            print(cluster.array_script(jobs))
        if dry_run or len(jobs) == 1:
            for job in jobs:
                self.submit(job)
            return
        try:
            cluster.submit_array(jobs)
        except Later:
            for job in jobs:
                self.submit(job)
        except ConfigError as error:
            for job in jobs:
                job.enter("failed", str(error))

    def submit(self, job: Job) -> None:
        """Submit a point to Slurm; a refused one counts as failed, and a dry run is printed and skipped.

        One that Slurm takes later, and those behind it, are held: pending, with a file that says so.
        """
        config = job.config.cluster
        cluster = self._cluster(job)
        if config.dry_run:
            print(cluster.script(job))
            job.enter("skipped", "cluster.dry_run=true")
            return
        try:
            if self._full:
                raise Later("points before it are held")
            cluster.submit(job)
            (job.folder / HELD_FILE).unlink(missing_ok=True)
        except Later as later:
            self._full = True
            mark_held_back(job, str(later))
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
        held: dict[int, Job] = {}
        for number, job in jobs.items():
            if job.state["status"] != "pending":
                progress.end(number, job.state["status"], job.state["reason"], job.name)
                on_end(job)
            elif is_held(job):
                held[number] = job
            elif job.config.cluster.wait:
                waited_for[number] = job
            else:
                progress.note(f"{job.name}: Slurm job {slurm_id(job)}")
        if held:
            reason = next(iter(held.values())).state["reason"]
            progress.note(f"{len(held)} points are held, since Slurm takes no more now: {reason}")
        wait = any(job.config.cluster.wait for job in held.values())
        later = HeldJobs(held if wait else {}, self)
        follow(waited_for, progress, on_step=on_step, on_end=on_end, held=later)

    def try_again(self) -> None:
        """Submit again though Slurm has refused a point for now."""
        self._full = False

    def _cluster(self, job: Job) -> SlurmCluster:
        """Return the config's cluster, kept because it counts its jobs; the local import saves others 0.15 s."""
        from zeroexp.cluster.slurm import SlurmCluster

        config = job.config.cluster
        return self._clusters.setdefault(repr(config), SlurmCluster(config))


class HeldJobs:
    """Points that Slurm would not take yet, in the order in which they are to be submitted."""

    def __init__(self, jobs: Mapping[int, Job], queue: Queue) -> None:
        self._jobs, self._queue = dict(jobs), queue

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def submit(self) -> dict[int, Job]:
        """Submit as many as Slurm takes now; return those it took, and those it refused for good too."""
        taken: dict[int, Job] = {}
        self._queue.try_again()
        for number, job in list(self._jobs.items()):
            self._queue.submit(job)
            if is_held(job):
                break
            taken[number] = self._jobs.pop(number)
        return taken


def mark_held_back(job: Job, reason: str) -> None:
    write_json(job.folder / HELD_FILE, {"reason": reason})
    job.enter("pending", reason)


def is_held(job: Job) -> bool:
    return (job.folder / HELD_FILE).exists() and job.state["status"] == "pending"


def cancel_unfinished(jobs: Iterable[Job]) -> list[Job]:
    """End and return the unfinished jobs, except jobs in Slurm with cluster.wait=false, or if Slurm is silent.

    One line then says how to end and follow the jobs that go on.
    """
    ours = [job for job in jobs if job.config.cluster.wait or not (slurm_id(job) or is_held(job))]
    stopped = [job for job in ours if job.state["status"] in UNFINISHED]
    try:
        in_slurm = cancel(stopped, STOPPED)
    except SlurmSilent as error:
        in_slurm = [job for job in stopped if slurm_id(job) or (job.folder / SUBMITTING).exists()]
        _tell_that_they_go_on(in_slurm, error)
        stopped = [job for job in stopped if job not in in_slurm]
    for job in stopped:
        if job not in in_slurm:
            job.enter("cancelled", STOPPED)
    return stopped


def _tell_that_they_go_on(jobs: Sequence[Job], error: SlurmSilent) -> None:
    ids = " ".join(job_id for job in jobs if (job_id := slurm_id(job)))
    sweep = os.path.relpath(jobs[0].folder.parent)
    print(
        f"zeroexp: Slurm does not answer ({error}), so that {len(jobs)} jobs go on"
        f"{f' ({ids})' if ids else ''}; once it does, "
        f"`python -m zeroexp.watch {sweep} --cancel` ends them, and without --cancel follows them",
        file=sys.stderr,
    )
