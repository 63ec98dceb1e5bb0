"""Follow Slurm jobs until each has ended, and submit those that are held; or cancel them.

Slurm tells the state of the jobs, and the files of their folders their steps.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from zeroexp.checkpoint.folders import LOG
from zeroexp.cluster import slurm_state
from zeroexp.cluster.job import Job
from zeroexp.cluster.slurm_state import Sighting, SlurmSilent
from zeroexp.cluster.submit import (
    SUBMITTING,
    adopt,
    awaits_sbatch,
    is_held_back,
    slurm_id,
    submit_all,
)
from zeroexp.cluster.task import CANCELLED_BY
from zeroexp.cluster.tell import tell
from zeroexp.process import signals
from zeroexp.report.sweep_progress import SweepProgress
from zeroexp.tracking.files import RECORDS, Tail, read_json, read_rows, step_record, write_json
from zeroexp.tracking.run import SLURM_FILE, UNFINISHED, read_state, why_abandoned

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 15.0  # between two queries to Slurm
PAUSE_GROWTH = 1.1
RETRY_SECONDS = 60.0  # between two submissions of a job that Slurm does not take yet
SECONDS_BETWEEN_LOOKS = 0.2  # at the runs' files
STOPPED = "the sweep was stopped"

OnRun = Callable[[Path], None]  # with its folder


def unfinished(jobs: Iterable[Job]) -> dict[str, Job]:
    """Return the submitted jobs that are not known to have ended, by Slurm's id."""
    return {
        job_id: job
        for job in jobs
        if job.status in UNFINISHED and (job_id := slurm_id(job)) is not None
    }


def refresh(jobs: Iterable[Job]) -> None:
    """Bring the state.json of these runs up to date, once. Raises SlurmSilent."""
    jobs = list(jobs)
    # First: Slurm has the job of a submitter that died before it could note the id.
    _adopt_all(jobs)
    for job in jobs:
        state = read_state(job.folder)  # once: its own process may write the end meanwhile
        reason = why_abandoned(job.folder, state)
        if reason and job.status in UNFINISHED:  # again: it may have died behind that
            job.enter("cancelled", reason)
    open_jobs = unfinished(jobs)
    if open_jobs:
        seen = slurm_state.look_up_jobs(open_jobs)
        for job_id, job in open_jobs.items():
            _settle(job, job_id, seen.get(job_id))


def refresh_if_slurm_answers(jobs: Iterable[Job]) -> None:
    """Refresh; where Slurm is silent, one line says that states are older."""
    try:
        refresh(jobs)
    except SlurmSilent as error:
        print(f"zeroexp: states are those of the last look: {error}", file=sys.stderr)


def _adopt_all(jobs: Iterable[Job]) -> None:
    """Note the ids of the jobs whose submitter was ended before it did. Raises SlurmSilent."""
    for job in jobs:
        if not adopt(job):
            continue
        # Of a wish, before anybody knew the id; a submitter's death ends no job that Slurm shows later.
        if job.status == "cancelled" and _wish_of(job).exists():
            slurm_state.cancel(filter(None, [slurm_id(job)]))
        else:
            job.enter("pending")


def _wish_of(job: Job) -> Path:
    return job.folder / slurm_state.SRUN_WRITES / CANCELLED_BY


def _note_wish(job: Job, reason: str) -> Path:
    _wish_of(job).parent.mkdir(exist_ok=True)
    _wish_of(job).write_text(reason, encoding="utf-8")
    return _wish_of(job)


def cancel(jobs: Sequence[Job], reason: str) -> list[Job]:
    """Cancel the unfinished jobs and return them. Raises SlurmSilent; then none that Slurm has is taken for cancelled.

    Points that wait to be submitted are cancelled first: a submitter notes the id, and then looks for that.
    """
    _adopt_all(jobs)
    with suppress(SlurmSilent):  # a job that has ended by now keeps its end
        refresh(jobs)
    waiting = [job for job in jobs if awaits_sbatch(job) or (job.folder / SUBMITTING).exists()]
    for job in waiting:
        _note_wish(job, reason)
        job.enter("cancelled", reason)
    open_jobs = unfinished(jobs)
    # For whoever sees the end before this process writes it.
    notes = [_note_wish(job, reason) for job in open_jobs.values()]
    try:
        slurm_state.cancel([*open_jobs, *filter(None, map(slurm_id, waiting))])
    except SlurmSilent:
        for note in notes:
            note.unlink(missing_ok=True)
        raise
    for job in open_jobs.values():
        job.enter("cancelled", reason)
    return [*open_jobs.values(), *waiting]


def cancel_unfinished(jobs: Iterable[Job]) -> list[Job]:
    """End and return the unfinished jobs, but for what Slurm has or takes later where nobody waits for it any more.

    That is with cluster.wait=false, and where the terminal is gone. Where Slurm is silent, one line says how to end and
    follow the jobs that go on.
    """
    jobs = [job for job in jobs if job.status in UNFINISHED]
    with suppress(SlurmSilent):
        _adopt_all(jobs)
    gone = signals.has_hung_up()
    stopped = [
        job
        for job in jobs
        if not ((gone or not job.config.cluster.wait) and (slurm_id(job) or is_held_back(job)))
    ]
    try:
        cancel(stopped, STOPPED)
    except SlurmSilent as error:
        go_on = [job for job in stopped if slurm_id(job) or (job.folder / SUBMITTING).exists()]
        stopped = [job for job in stopped if job not in go_on]
        names = " ".join(slurm_id(job) or job.name for job in go_on)
        sweep = shlex.quote(os.path.relpath(go_on[0].folder.parent))
        line = f"Slurm does not answer ({error}), so that {len(go_on)} jobs go on ({names}); once it does"
        ends = f"`zeroexp watch {sweep} --cancel` ends them, and without --cancel follows them"
        print(f"zeroexp: {line}, {ends}", file=sys.stderr)
    for job in stopped:
        if job.status in UNFINISHED:
            job.enter("cancelled", STOPPED)
    return stopped


def follow_waited(
    jobs: Mapping[int, Job], progress: SweepProgress, *, on_step: OnRun, on_end: OnRun
) -> None:
    """Follow those of a sweep's submitted jobs that it waits for (cluster.wait), and say what becomes of the others."""
    waited: dict[int, Job] = {}
    held = [job for job in jobs.values() if is_held_back(job)]
    for number, job in jobs.items():
        if job.config.cluster.wait or job.status != "pending":
            waited[number] = job
        elif job not in held:
            progress.note(f"{job.name}: Slurm job {slurm_id(job)}")
    if held:
        reason = held[0].state["reason"]
        progress.note(f"{len(held)} points are held, since Slurm takes no more now: {reason}")
    follow(waited, progress, on_step=on_step, on_end=on_end)


def follow(
    jobs: Mapping[int, Job], progress: SweepProgress, *, on_step: OnRun, on_end: OnRun
) -> None:
    """Return when all jobs have ended. Keys are the points' numbers in `progress`; `on_end` is called once per run.

    Those that are held are submitted again whenever one has ended, and every RETRY_SECONDS.
    """
    rest, followed = dict(jobs), list[_Followed]()
    pause, silent, retry = FIRST_PAUSE_SECONDS, False, time.monotonic()
    while True:
        held = [job for job in rest.values() if is_held_back(job)]
        if held and time.monotonic() >= retry:
            submit_all(held)
            retry = time.monotonic() + RETRY_SECONDS
        for number, job in list(rest.items()):
            if is_held_back(job):
                continue
            del rest[number]
            if job.status in UNFINISHED:
                followed.append(_Followed(number, job, progress, on_step))
            else:  # it was refused for good, or had ended before
                progress.end(number, job.status, job.state["reason"], job.name)
                on_end(job.folder)
        if not (rest or followed):
            return
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
                on_end(each.job.folder)
                retry = time.monotonic()
        _show_steps(followed, pause)
        pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE_SECONDS)


class ShownRun:
    """A run whose steps, failed saves and damaged checkpoints appear in a sweep's progress as its files grow.

    skip: only what is appended from now on.
    """

    def __init__(
        self, number: int, job: Job, progress: SweepProgress, on_step: OnRun, *, skip: bool = False
    ) -> None:
        self.job = job
        self._number, self._progress, self._on_step = number, progress, on_step
        self._records, self._log = Tail(job.folder / RECORDS), Tail(job.folder / LOG)
        for passed in [self._log, *([self._records] if skip else [])]:
            passed.new_lines()
        self._started = False

    def start(self) -> None:
        train = self.job.config.train
        self._progress.start(self._number, self.job.name, train.warmup_steps + train.steps)
        self._started = True

    def show_steps(self) -> None:
        rows = read_rows(self._records.new_lines() if self._started else ())
        for row in rows:
            self._progress.step(self._number, step_record(row), is_newest=row is rows[-1])
            self._on_step(self.job.folder)
        for line in self._log.new_lines():
            with suppress(ValueError):  # torn, as a full disk leaves it
                if error := json.loads(line)["error"]:
                    self._progress.note(error)


class _Followed(ShownRun):
    """A shown run that Slurm runs."""

    def __init__(self, number: int, job: Job, progress: SweepProgress, on_step: OnRun) -> None:
        super().__init__(number, job, progress, on_step)
        job_id = slurm_id(job)
        assert job_id is not None, "only what was submitted can be followed"
        self.job_id, self.status = job_id, job.status
        self._waits_for: str | None = None

    def advance(self, seen: Sighting | None) -> bool:
        """Take in Slurm's answer; return True if the job has ended."""
        if (settled := _settle(self.job, self.job_id, seen)) is None:
            self.job_id = slurm_id(self.job) or self.job_id
            settled = self.job.status, self.job.state["reason"]
        status, reason = settled
        if status == "pending" and reason not in (None, "None", self._waits_for):
            self._progress.note(f"{self.job.name}: waits in Slurm ({reason})")
            self._waits_for = reason
        if status == "running" and not self._started:
            self.start()
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


def _settle(job: Job, job_id: str, seen: Sighting | None) -> tuple[str, str | None] | None:
    """Write and return what became of the run's job; None if that is another by now: a --rerun submitted it."""
    status, reason = slurm_state.conclude_state(job, seen)
    submitted = read_json(job.folder / SLURM_FILE)
    if submitted is None or submitted["job_id"] != job_id:
        return None
    if seen and seen.nodes and submitted.get("node_list") != seen.nodes:
        # Comparing runs by node reveals a slow one.
        write_json(job.folder / SLURM_FILE, {**submitted, "node_list": seen.nodes})
    before = job.state
    if (status, reason) != (before["status"], before["reason"]):
        job.enter(status, reason)
        if before["status"] in UNFINISHED:
            tell(job)
    return status, reason


def _show_steps(followed: list[_Followed], seconds: float) -> None:
    """Show new steps for this many seconds; reading our files, unlike a query to Slurm, burdens no other user."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for each in followed:
            each.show_steps()
        time.sleep(SECONDS_BETWEEN_LOOKS)
