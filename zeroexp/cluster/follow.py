"""Follow Slurm jobs until each has ended: Slurm tells their state, and the files of their folders their steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from zeroexp.cluster import slurm_state
from zeroexp.cluster.follow_file import Complaints, Tail
from zeroexp.cluster.job import Job
from zeroexp.cluster.slurm_state import Sighting, SlurmSilent
from zeroexp.cluster.submit import SUBMITTING, adopt, note
from zeroexp.plan.machines import JobShape
from zeroexp.report.sweep_progress import Progress
from zeroexp.tracking.files import RECORDS, read_json, read_rows, step_record, write_json
from zeroexp.tracking.run import SLURM_FILE, UNFINISHED, state_of

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 15.0  # between two queries to Slurm
PAUSE_GROWTH = 1.1
RETRY_SECONDS = 60.0  # between two submissions of a job that Slurm does not take yet
SECONDS_BETWEEN_LOOKS = 0.2  # at the runs' files


def slurm_id(job: Job) -> str | None:
    """Return Slurm's id of the job; None if the run was never submitted to Slurm."""
    submitted = read_json(job.folder / SLURM_FILE)
    return submitted["job_id"] if submitted else None


def unfinished(jobs: Iterable[Job]) -> dict[str, Job]:
    """Return the submitted jobs that are not known to have ended, by Slurm's id."""
    return {
        job_id: job
        for job in jobs
        if job.state["status"] in UNFINISHED and (job_id := slurm_id(job)) is not None
    }


def refresh(jobs: Iterable[Job]) -> None:
    """Bring the state.json of these runs up to date, once. Raises SlurmSilent."""
    jobs = list(jobs)
    for job in jobs:
        if (state := state_of(job.folder))["status"] != job.state["status"]:
            job.enter(state["status"], state["reason"])
    _adopt_all(jobs)
    open_jobs = unfinished(jobs)
    if open_jobs:
        seen = slurm_state.look_up_jobs(open_jobs)
        for job_id, job in open_jobs.items():
            _settle(job, seen.get(job_id))


def _adopt_all(jobs: Iterable[Job]) -> None:
    """Note the ids of the jobs whose submitter was ended before it did. Raises SlurmSilent."""
    for job in jobs:
        if (job.folder / SUBMITTING).exists() and (job_id := adopt(job.folder)):
            shape = JobShape.of(job.config.world_size, job.config.cluster.slurm.ranks_per_node)
            note(job.folder, job_id, shape.nodes, shape.ranks_per_node)
            job.enter("pending")


def cancel(jobs: Sequence[Job], reason: str) -> list[Job]:
    """Cancel the unfinished jobs and return them. Raises SlurmSilent; then none of them is taken for cancelled."""
    _adopt_all(jobs)
    open_jobs = unfinished(jobs)
    slurm_state.cancel(open_jobs)
    for job in open_jobs.values():
        job.enter("cancelled", reason)
    return list(open_jobs.values())


def follow(
    jobs: Mapping[int, Job],
    progress: Progress,
    *,
    on_step: Callable[[Job], None],
    on_end: Callable[[Job], None],
    held: Held | None = None,
) -> None:
    """Return when all jobs have ended. Keys are the points' numbers in `progress`; `on_end` is called once per run.

    held: jobs that Slurm does not take yet. They are tried again whenever one has ended, and every RETRY_SECONDS.
    """
    followed = [_Followed(number, job, progress, on_step) for number, job in jobs.items()]
    pause, silent, retry = FIRST_PAUSE_SECONDS, False, time.monotonic()
    while followed or held:
        if held and time.monotonic() >= retry:
            taken = held.submit()
            for number, job in taken.items():
                if slurm_id(job) is not None:
                    followed.append(_Followed(number, job, progress, on_step))
                else:  # refused for good
                    progress.end(number, job.state["status"], job.state["reason"], job.name)
                    on_end(job)
            retry = time.monotonic() + RETRY_SECONDS
        try:
            seen = slurm_state.look_up_jobs(each.job_id for each in followed)
        except SlurmSilent as error:
            if not silent:
                progress.note(f"waiting for Slurm, which does not answer: {error}")
            silent = True
        else:
            silent = False
            before = [each.status for each in followed]
            ended = [each for each in followed if each.advance(seen.get(each.job_id))]
            if [each.status for each in followed] != before:
                pause = FIRST_PAUSE_SECONDS  # where one changes, others soon do
            for each in ended:
                followed.remove(each)
                on_end(each.job)
                retry = time.monotonic()
        _show_steps(followed, pause)
        pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE_SECONDS)


class Held(Protocol):
    """Jobs that Slurm would not take yet; false once there are none."""

    def __bool__(self) -> bool: ...
    def submit(self) -> Mapping[int, Job]:
        """Submit as many as Slurm takes now and return those, by their numbers."""
        ...


class _Followed:
    def __init__(
        self, number: int, job: Job, progress: Progress, on_step: Callable[[Job], None]
    ) -> None:
        job_id = slurm_id(job)
        assert job_id is not None, "only what was submitted can be followed"
        self.job_id, self.job = job_id, job
        self._number, self._progress, self._on_step = number, progress, on_step
        self._records, self._complaints = Tail(job.folder / RECORDS), Complaints(job.folder)
        self._started = False
        self._waits_for: str | None = None
        self.status = job.state["status"]

    def advance(self, seen: Sighting | None) -> bool:
        """Take in Slurm's answer; return True if the job has ended."""
        status, reason = _settle(self.job, seen)
        if status == "pending" and reason not in (None, "None", self._waits_for):
            self._progress.note(f"{self.job.name}: waits in Slurm ({reason})")
            self._waits_for = reason
        if status == "running" and not self._started:
            train = self.job.config.train
            self._progress.start(self._number, self.job.name, train.warmup_steps + train.steps)
            self._started = True
        if status != self.status and status in ("requeued", "preempted"):
            self._progress.note(f"{self.job.name}: {status}, to be started again: {reason}")
        if status == "running" and self.status in ("requeued", "preempted"):
            self._progress.note(f"{self.job.name}: runs again")
        self.status = status
        self.show_steps()
        if status in UNFINISHED:
            return False
        self._progress.end(self._number, status, reason, self.job.name)
        return True

    def show_steps(self) -> None:
        for row in read_rows(self._records.new_lines() if self._started else ()):
            self._progress.step(self._number, step_record(row))
            self._on_step(self.job)
        for line in self._complaints.new_complaints():
            self._progress.note(line)


def _settle(job: Job, seen: Sighting | None) -> tuple[str, str | None]:
    status, reason = slurm_state.conclude_state(job, seen)
    if seen and seen.nodes:
        _note_nodes(job, seen.nodes)
    known = job.state
    if (status, reason) != (known["status"], known["reason"]):
        job.enter(status, reason, meanwhile=slurm_state.passed_through(job))
    return status, reason


def _note_nodes(job: Job, node_list: str) -> None:
    """Record the job's nodes in slurm.json: comparing runs by node reveals a slow one."""
    submitted = read_json(job.folder / SLURM_FILE)
    if submitted and submitted.get("node_list") != node_list:
        write_json(job.folder / SLURM_FILE, {**submitted, "node_list": node_list})


def _show_steps(followed: list[_Followed], seconds: float) -> None:
    """Show new steps for this many seconds; reading our files, unlike a query to Slurm, burdens no other user."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for each in followed:
            each.show_steps()
        time.sleep(SECONDS_BETWEEN_LOOKS)
