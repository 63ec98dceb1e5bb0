"""Hand runs to Slurm, and find out which jobs they became, also when sbatch does not say.

sbatch may time out after Slurm has queued the job, and the submitter may be killed between sbatch and the note of the
job's id. So each submission has a name of ours, which is the job's comment and is noted in the run's folder
before sbatch starts. Whoever looks at the run later finds its job by that name (`adopt`), or, as squeue soon forgets a
job that has ended, by the id that its batch file wrote as it began.

Only jobs of runs that save checkpoints are requeued: another run would start from the beginning unnoticed.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict

from zeroexp.cluster import slurm_state
from zeroexp.cluster.job import Job
from zeroexp.cluster.local import RANK_MAIN
from zeroexp.cluster.slurm_state import NO_ANSWER, SlurmSilent, find_by_comment
from zeroexp.cluster.task import CANCELLED_BY, JOB_ID
from zeroexp.cluster.tell import tell
from zeroexp.config.job_shape import JobShape
from zeroexp.config.keys import ConfigError
from zeroexp.tracking.files import read_json, write_json
from zeroexp.tracking.run import SLURM_FILE

SUBMITTING = "submitting.json"  # in the run's folder while its job's id is unknown
LOOKS, SECONDS_BETWEEN_LOOKS = 5, 2.0  # for a job that sbatch may have queued
NO_GPUS = (
    "its nodes have no such GPUs: use cluster.device=cpu, fewer ranks_per_node or another partition"
)
# Slurm refuses such a job now and takes it once other jobs of this user have ended. The words "Job violates
# accounting/QOS policy" alone are no sign of that: Slurm also says them of jobs that it never takes.
QUEUE_IS_FULL = re.compile(
    r"(Max|Grp)Submit|temporarily unable|MaxJobCount|maximum number of jobs|connect failure"
)
TOO_LARGE = "Invalid job array specification"  # by MaxArraySize
UNSURE = re.compile(NO_ANSWER)


class QueueFull(ConfigError):
    """Slurm takes no more jobs of this user now, not as many in one array, or its controller is away."""


def submit_all(jobs: Iterable[Job], *, rank_main: str = RANK_MAIN) -> None:
    """Submit pending points, those of one shape as a job array where cluster.slurm.array asks for it.

    A refused point counts as failed, and a dry run is printed and skipped. One that Slurm takes later, and those behind
    it, are held: pending, with a reason and without a job.
    """
    groups, full = _in_arrays(jobs), None
    while groups:
        # `zeroexp watch --cancel` of another terminal cancels what is not submitted yet.
        group = [job for job in groups.pop(0) if job.status == "pending"]
        if not group:
            continue
        if group[0].config.cluster.dry_run:
            _print_files(group)
            continue
        try:
            if full:
                raise full
            submit_job_or_array(group, rank_main=rank_main)
        except QueueFull as error:
            if len(group) > 1:  # perhaps Slurm takes some of them
                groups[:0] = [[job] for job in group]
                continue
            hold(group[0], str(error))
            full = QueueFull("points before it are held")
        except ConfigError as error:
            for job in group:
                job.enter("failed", str(error))
                tell(job)


def submit_job_or_array(jobs: Sequence[Job], *, rank_main: str = RANK_MAIN) -> None:
    """Submit one run as a job, or runs of one shape as a job array; their slurm.json then names their jobs.

    Raises ConfigError with sbatch's message if Slurm refuses, and its subclass QueueFull if that will pass.
    """
    # submitit takes 0.06 s to import, and most sweeps need none of it.
    from zeroexp.cluster.batch_file import ELEMENT, array_file, batch_file, element_text

    name = f"{jobs[0].folder.name} zeroexp-{secrets.token_hex(8)}"
    for index, job in enumerate(jobs):
        slurm = job.folder / "slurm"
        slurm.mkdir(exist_ok=True)
        for of_the_job_before in (JOB_ID, CANCELLED_BY):
            (slurm / of_the_job_before).unlink(missing_ok=True)
        element = {"element": index} if len(jobs) > 1 else {}
        if element:
            (slurm / ELEMENT).write_text(element_text(job, rank_main), encoding="utf-8")
        write_json(job.folder / SUBMITTING, {"name": name, **element})
    file = array_file(jobs) if len(jobs) > 1 else batch_file(jobs[0], rank_main)
    job_id, message = file.submit(name)
    if job_id is None and (not message or UNSURE.search(message)):
        try:
            job_id = _look_for(name)
        except SlurmSilent as error:  # SUBMITTING stays: whoever looks later finds the job
            problem = f"whether it is queued is unknown ({error}); look later with zeroexp watch"
            raise ConfigError(f"cluster.slurm: {_complaint(message)}; {problem}") from error
    if job_id is None:
        for job in jobs:
            (job.folder / SUBMITTING).unlink(missing_ok=True)
        too_many = QUEUE_IS_FULL.search(message) or (len(jobs) > 1 and TOO_LARGE in message)
        raise (QueueFull if too_many else ConfigError)(f"cluster.slurm: {_complaint(message)}")
    for index, job in enumerate(jobs):
        _note(job, f"{job_id}_{index}" if len(jobs) > 1 else job_id)
    meanwhile = [slurm_id(job) for job in jobs if job.status == "cancelled"]
    with suppress(SlurmSilent):
        slurm_state.cancel(filter(None, meanwhile))


def adopt(job: Job) -> bool:
    """Note the id of a job whose submitter did not live to note it; False if Slurm knows of none.

    Raises SlurmSilent.
    """
    if not (submitting := read_json(job.folder / SUBMITTING)):
        return False
    began = job.folder / "slurm" / JOB_ID
    if job_id := began.read_text(encoding="utf-8").strip() if began.exists() else "":
        _note(job, job_id)
    elif job_id := find_by_comment(submitting["name"]):
        _note(job, f"{job_id}_{submitting['element']}" if "element" in submitting else job_id)
    return bool(job_id)


def hold(job: Job, reason: str) -> None:
    if job.status == "pending" and not is_held_back(job):
        job.enter("pending", reason)


def is_held_back(job: Job) -> bool:
    """Tell whether Slurm would not take the run yet, for its state's reason; whoever follows the sweep submits it."""
    state = job.state
    return state["status"] == "pending" and bool(state["reason"]) and slurm_id(job) is None


def slurm_id(job: Job) -> str | None:
    """Return Slurm's id of the job; None if the run was never submitted to Slurm."""
    submitted = read_json(job.folder / SLURM_FILE)
    return submitted["job_id"] if submitted else None


def awaits_sbatch(job: Job) -> bool:
    """Tell whether the run is to be submitted, by whoever owns the sweep."""
    waits = job.status == "pending" and slurm_id(job) is None
    return waits and job.config.cluster.kind == "slurm"


def _in_arrays(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the jobs in groups, each of which is submitted at once."""
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        config = job.config
        shape = (repr(config.cluster), config.world_size)
        groups.setdefault(shape if config.cluster.slurm.array else job, []).append(job)
    return list(groups.values())


def _print_files(jobs: Sequence[Job]) -> None:
    from zeroexp.cluster.batch_file import array_file, batch_file

    if len(jobs) > 1:
        print(array_file(jobs).text())
    for job in jobs:
        print(batch_file(job).text())
        job.enter("skipped", "cluster.dry_run=true")


def _note(job: Job, job_id: str) -> None:
    """Write the run's slurm.json; it is no longer being submitted."""
    shape = JobShape.of(job.config.world_size, job.config.cluster.slurm.ranks_per_node)
    write_json(job.folder / SLURM_FILE, {"job_id": job_id, **asdict(shape)})
    (job.folder / SUBMITTING).unlink(missing_ok=True)


def _look_for(name: str) -> str | None:
    """Return the id of a job that sbatch may have queued, None if there is none. Raises SlurmSilent."""
    for num_left in reversed(range(LOOKS)):
        try:
            if job_id := find_by_comment(name):
                return job_id
        except SlurmSilent:
            if not num_left:
                raise
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return None


def _complaint(message: str) -> str:
    """Return what sbatch complains of, in one line: first the cause, where it names one."""
    errors = [
        line.partition("error:")[2].strip() for line in message.splitlines() if "error:" in line
    ]
    if not message:
        return "sbatch was killed, or ended without a word, and no job of it was found; try again"
    line = "sbatch: error: " + "; ".join(errors) if errors else message.partition("\n")[0]
    return f"{line}; {NO_GPUS}" if "generic resource" in line else line
