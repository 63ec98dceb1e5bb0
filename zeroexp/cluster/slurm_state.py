"""Ask Slurm about jobs: squeue, which always works and soon forgets; then sacct, which some sites do not have."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zeroexp.cluster.job import Job, Status, ending_of, first_cause, reason_of
from zeroexp.cluster.task import CANCELLED_BY, ENDED, JOB_ID, PREEMPTED, TIME_LIMIT
from zeroexp.config.keys import ConfigError
from zeroexp.tracking import attempt, failure
from zeroexp.tracking.json_files import read_json
from zeroexp.tracking.run import SLURM_FILE

OF_THIS_USER = (f"--user={os.getuid()}", "--noheader", "--states=all")
OPTIONS_OF_THE_USER = ("SQUEUE_", "SACCT_", "SCANCEL_")
SRUN_WRITES = "slurm"  # a folder in the run's folder
CANCELLED_IN_SLURM = "cancelled in Slurm"  # and not by us
# What commands say, as a regular expression, where the controller may or may not have done what was asked.
NO_ANSWER = "[Tt]imed out|Zero Bytes|Unexpected message|(send|receive|shutdown) failure"


@dataclass(frozen=True)
class Sighting:
    """One job as Slurm sees it."""

    word: str  # PENDING, RUNNING, ...; man squeue, "JOB STATE CODES"
    reason: str  # why the job waits or ended
    nodes: str  # node[1-2]
    preempted: bool  # it was asked to make room; a job that obeys ends as FAILED
    restarts: int = 0  # how often Slurm restarted it


def require_slurm() -> None:
    """Raise ConfigError if this machine cannot submit jobs."""
    if shutil.which("sbatch") is None:
        remedy = "a login node, cluster.dry_run=true, or a Slurm of your own (slurm/minicluster)"
        raise ConfigError(f"cluster=slurm: there is no sbatch on this machine; use {remedy}")


class SlurmSilent(ConfigError):
    """Slurm does not answer now, so the state of its jobs is unknown."""


def look_up_jobs(job_ids: Iterable[str]) -> dict[str, Sighting]:
    """Return the jobs that Slurm knows; it has forgotten the missing ones. Raises SlurmSilent."""
    wanted = set(job_ids)
    seen = ask_squeue(wanted)
    if missing := wanted - set(seen):
        seen |= ask_sacct(missing)
    return seen


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel jobs; those that have ended or are forgotten are passed over. Raises SlurmSilent."""
    if ids := list(job_ids):
        _ask("scancel", *ids)


def find_by_comment(comment: str) -> str | None:
    """Return the id of the newest job with this comment; None if Slurm knows of none. Raises SlurmSilent."""
    for line in _ask("squeue", *OF_THIS_USER, "--Format=ArrayJobID:|,Comment:|").splitlines():
        job_id, _, rest = line.partition("|")
        if rest.strip().rstrip("|") == comment:
            return job_id.strip()
    return None


def ask_squeue(wanted: set[str]) -> dict[str, Sighting]:
    # This asks for all jobs of the user, since asking for a forgotten id alone would be an error.
    fields = ("JobArrayID", "State", "Reason", "NodeList", "PreemptTime", "RestartCnt")
    shown = f"--Format={','.join(f'{field}:|' for field in fields)}"
    return parse_job_lines(_ask("squeue", *OF_THIS_USER, "--array", shown), wanted)


def ask_sacct(wanted: set[str]) -> dict[str, Sighting]:
    ids, shown = f"--jobs={','.join(sorted(wanted))}", "--format=JobID,State,Reason,NodeList"
    try:
        lines = _ask("sacct", ids, "--noheader", "--parsable", "--allocations", shown)
    except SlurmSilent as error:
        if "accounting storage is disabled" in str(error):
            return {}
        raise
    return parse_job_lines(lines, wanted)


def _ask(*command: str) -> str:
    """Return what a command of Slurm prints. Raises SlurmSilent with its first words where it fails.

    SQUEUE_PARTITION and its like, of the user's environment, would hide jobs from it.
    """
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(OPTIONS_OF_THE_USER)
    }
    try:
        asked = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, env=env
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmSilent(f"{command[0]} did not answer within {error.timeout:.0f} s") from error
    except FileNotFoundError as error:
        raise SlurmSilent(f"{command[0]} is not here; ask on a machine of the cluster") from error
    if asked.returncode:
        raise SlurmSilent(asked.stderr.strip().partition("\n")[0])
    return asked.stdout


def parse_job_lines(lines: str, wanted: set[str]) -> dict[str, Sighting]:
    """Parse lines in which every field ends in a bar; squeue prints six fields, sacct the first four."""
    seen: dict[str, Sighting] = {}
    for line in lines.splitlines():
        job_id, state, reason, nodes, *more = line.strip().removesuffix("|").split("|")
        word = state.split()[0]  # "CANCELLED by 1000"
        nodes = nodes.replace("None assigned", "")  # by sacct
        preempted, restarts = more or ("N/A", "0")
        if job_id in wanted:
            seen[job_id] = Sighting(word, reason, nodes, preempted != "N/A", int(restarts))
    return seen


RUNS = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "SUSPENDED", "RESIZING"}
WAITS = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"}
WAITS |= {"SPECIAL_EXIT"}  # as a site's RequeueExitHold holds it, until somebody releases it
LOST: dict[str, tuple[Status, str]] = {
    "NODE_FAIL": ("node_lost", "node lost"),
    "BOOT_FAIL": ("node_lost", "a node did not boot"),
    "PREEMPTED": ("failed", PREEMPTED),
    "OUT_OF_MEMORY": ("out_of_memory", "out of memory: Slurm's limit was reached"),
}


def conclude_state(job: Job, seen: Sighting | None) -> tuple[Status, str | None]:
    """Return a run's status and reason from Slurm's state and the run's own files, which explain a failure better."""
    if seen is None:
        return _ending_from_files(job, "Slurm has forgotten the job, and it left no result")
    if seen.word in RUNS:
        return ("preempted", PREEMPTED) if seen.preempted else ("running", None)
    if seen.word in WAITS:
        return _state_of_waiting(job, seen)
    if seen.word == "CANCELLED":
        if (ours := job.folder / SRUN_WRITES / CANCELLED_BY).exists():
            return "cancelled", ours.read_text(encoding="utf-8")
        # Where a node's Prolog fails, say. NFS caches that a file is missing, unless the folder is listed.
        there = {path.name for path in (job.folder / SRUN_WRITES).glob("*")}
        unstarted = seen.nodes and there.isdisjoint({JOB_ID, _batch_errors(job).name})
        where = f" before it began on {seen.nodes} (sinfo -R may say why)" if unstarted else ""
        return "cancelled", f"{CANCELLED_IN_SLURM}{where}"
    if seen.word == "DEADLINE":
        return "timed_out", "its deadline came (cluster.slurm.sbatch.deadline)"
    if seen.word == "TIMEOUT":
        own = job.config.cluster.slurm.sbatch.get("time")
        limit = f"time limit of {own} (cluster.slurm.sbatch.time)"
        return "timed_out", limit if own else reason_of("timed_out", job)
    preempted = seen.preempted or _last_reason(job) == PREEMPTED  # sacct does not report it
    word = "PREEMPTED" if preempted and seen.word == "FAILED" else seen.word
    # Where another failure came first, it may be a consequence.
    if word == "OUT_OF_MEMORY" and (job.failure or {}).get("out_of_memory"):
        return "out_of_memory", first_cause(job.failure)
    if word in LOST:
        status, reason = LOST[word]
        nodes = _down_among(seen.nodes) if word == "NODE_FAIL" else None
        met = f": {first_cause(job.failure)}" if word == "OUT_OF_MEMORY" and job.failure else ""
        return status, f"{reason} ({nodes or seen.nodes}){met}"
    if seen.reason == "JobLaunchFailure" and not _batch_errors(job).exists():
        where = f"{seen.nodes} could not open {job.folder.resolve()}"
        return "failed", f"{where}: outputs must lie where all nodes see it under this path"
    how = "no error, and no result either" if word == "COMPLETED" else f"{word} ({seen.reason})"
    return _ending_from_files(job, f"Slurm says {how}; see {job.folder / 'slurm'}")


def _state_of_waiting(job: Job, seen: Sighting) -> tuple[Status, str | None]:
    """Return the status of a job that waits for its first or a further start.

    Slurm forgets at once that it preempted a job, so our own state remembers it.
    """
    if not seen.restarts:
        return "pending", None if seen.reason == "None" else seen.reason
    status = "preempted" if job.status == "preempted" else "requeued"
    # One that is held is started once somebody releases it.
    told = [_last_reason(job), seen.reason if "held" in seen.reason.lower() else ""]
    return status, "; ".join(filter(None, told))


def _last_reason(job: Job) -> str:
    """Return why the last attempt ended: the batch file, which saw the end of its tasks, knows better than they."""
    if not (attempts := attempt.read(job.folder)):
        return ""
    note = job.folder / SRUN_WRITES / f"ended{attempts[-1]['number']}"
    told = note.read_text(encoding="utf-8").strip() if note.exists() else attempts[-1].get("reason")
    return told or attempt.WITHOUT_A_WORD


OF_BATCH_FILE = re.compile(r"^zeroexp: (.+)$", re.MULTILINE)
# An example of a line: srun: error: node1: task 0: Killed
OF_SRUN = re.compile(r"^srun: error: (\S+): tasks? (\d+)\S*: (.+)$", re.MULTILINE)


def _ending_from_files(job: Job, otherwise: str) -> tuple[Status, str | None]:
    # NFS caches for a minute that a file is missing, unless the folder is listed
    os.listdir(job.folder)
    if job.failure:
        return ending_of("failed", job.failure), first_cause(job.failure)
    if job.summary:
        return "done", job.verdict
    file = _batch_errors(job)
    text = file.read_text(errors="replace", encoding="utf-8") if file.exists() else ""
    if line := OF_BATCH_FILE.search(text):
        return "failed", f"{line[1]} ({file})"
    if (reason := _last_reason(job)).startswith(TIME_LIMIT):  # it saved, and is not to be requeued
        return "timed_out", reason
    if reason in (PREEMPTED, ENDED):
        return "failed", reason
    return "failed", _first_to_end(file, text) or otherwise


def _batch_errors(job: Job) -> Path:
    """Return the file that the run's job writes errors to as it begins; earlier jobs of the run have others."""
    job_id = (read_json(job.folder / SLURM_FILE) or {}).get("job_id")
    return job.folder / SRUN_WRITES / f"{job_id}_batch.err"


def _down_among(nodes: str) -> str | None:
    """Return those of a lost job's nodes that are down now; None if all are up again, or Slurm does not answer."""
    try:
        lines = _ask("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T")
    except SlurmSilent:
        return None
    states = [line.strip().split("|") for line in lines.splitlines()]
    return ",".join(sorted({node for node, state in states if state.startswith("down")})) or None


def _first_to_end(file: Path, text: str) -> str | None:
    """Return which task srun saw end first and how, for a failure that neither the task nor its peers could report."""
    if not (line := OF_SRUN.search(text)):
        return None
    node, rank, how = line.groups()
    log = file.with_name(file.name.replace("_batch", f"_{rank}_log"))
    end = f"rank {rank} on {node}: its task ended first ({how.lower()}, says srun)"
    return f"{end}: {last}" if (last := failure.last_line(log)) else end
