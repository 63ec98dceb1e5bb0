"""Hand a batch file to sbatch and find out which job it became, also when sbatch does not say.

sbatch may time out after Slurm has queued the job, and the submitter may be killed between sbatch and the note of the
job's id. So each submission has a name of ours, which is the job's comment and is noted in the run's folder
before sbatch starts. Whoever looks at the run later finds its job by that name (`adopt`).
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeroexp.cluster.batch import BATCH_FILE
from zeroexp.cluster.slurm_state import SlurmSilent, ask
from zeroexp.config import ConfigError
from zeroexp.tracking.files import read_json, write_json
from zeroexp.tracking.run import SLURM

SUBMITTING = "submitting.json"  # in the run's folder while its job's id is unknown
SBATCH_SECONDS = 120.0
LOOKS, SECONDS_BETWEEN_LOOKS = 5, 2.0  # for a job that sbatch may have queued
NO_GPUS = (
    "its nodes have no such GPUs: use cluster.device=cpu, fewer ranks_per_node or another partition"
)
# What Slurm refuses now and takes once other jobs of this user have ended. "Job violates accounting/QOS policy" alone
# is also said of what it never takes.
LATER = re.compile(r"MaxSubmit|temporarily unable|MaxJobCount|maximum number of jobs")
UNSURE = re.compile(r"[Tt]imed out|Zero Bytes|Unexpected message|Unable to contact")


class Later(ConfigError):
    """Slurm takes no more jobs of this user now."""


def submit(folder: Path, text: str) -> str:
    """Submit the run of this folder by this batch file; return the job's id.

    Raises ConfigError with sbatch's message if Slurm refuses, and its subclass Later if that will pass.
    """
    name = f"{folder.name} zeroexp-{secrets.token_hex(8)}"
    return _submit({folder: {"name": name}}, _written(folder / "slurm" / BATCH_FILE, text), name)


def submit_array(texts: Mapping[Path, str], array_text: str) -> list[str]:
    """Submit the runs of these folders, whose batch files are given, as a job array; return the jobs' ids.

    Raises what `submit` raises; then none of them is submitted.
    """
    folders = list(texts)
    for folder, text in texts.items():
        _written(folder / "slurm" / BATCH_FILE, text)
    name = f"{folders[0].parent.name} zeroexp-{secrets.token_hex(8)}"
    notes = {folder: {"name": name, "element": index} for index, folder in enumerate(folders)}
    array_id = _submit(notes, _written(folders[0] / "slurm" / "array.sh", array_text), name)
    return [f"{array_id}_{index}" for index in range(len(folders))]


def _written(file: Path, text: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def _submit(notes: Mapping[Path, dict[str, Any]], file: Path, name: str) -> str:
    """Note in these folders what is about to be submitted, and submit it; return its id."""
    for folder, content in notes.items():
        write_json(folder / SUBMITTING, content)
    job_id, words = _sbatch(file, name)
    if job_id is None and UNSURE.search(words):
        job_id = _look_for(name)
    if job_id is None:
        for folder in notes:
            (folder / SUBMITTING).unlink()
        kind = Later if LATER.search(words) else ConfigError
        raise kind(f"cluster.slurm: {_complaint(words)}")
    return job_id


def note(folder: Path, job_id: str, nodes: int, ranks_per_node: int) -> None:
    """Write the run's slurm.json."""
    content = {"job_id": job_id, "nodes": nodes, "ranks_per_node": ranks_per_node}
    write_json(folder / SLURM, content)
    (folder / SUBMITTING).unlink(missing_ok=True)


def adopt(folder: Path) -> str | None:
    """Return the id of a job that this folder's submitter did not live to note; None if Slurm knows of none."""
    submitting = read_json(folder / SUBMITTING)
    found = _find(submitting["name"]) if submitting else None
    if submitting and found and "element" in submitting:
        return f"{found}_{submitting['element']}"
    return found


def outside_of_jobs() -> dict[str, str]:
    """Return the environment without what an interactive job or step of Slurm has set.

    sbatch hands its environment on to the job, where such variables would bind, size or name the ranks' step.
    """
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {
        key: value
        for key, value in os.environ.items()
        if key in kept or not key.startswith(("SLURM_", "SLURMD_", "PMI_", "PMIX_", "PMI2_"))
    }


def _sbatch(file: Path, name: str) -> tuple[str | None, str]:
    """Return the job's id, or None and sbatch's words."""
    command = ["sbatch", "--parsable", f"--comment={name}", str(file)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SBATCH_SECONDS, env=outside_of_jobs()
        )
    except subprocess.TimeoutExpired:
        return None, f"error: sbatch timed out after {SBATCH_SECONDS:.0f} s"
    found = re.match(r"(\d+)", done.stdout)
    if done.returncode == 0 and found:
        return found[1], ""
    return None, done.stderr.strip() or f"error: sbatch said: {done.stdout.strip()}"


def _look_for(name: str) -> str | None:
    for _ in range(LOOKS):
        with suppress(SlurmSilent):
            if found := _find(name):
                return found
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return None


def _find(name: str) -> str | None:
    """Ask squeue for the newest job of this name. Raises SlurmSilent."""
    user = f"--user={os.getuid()}"
    asked = ask("squeue", user, "--noheader", "--states=all", "--Format=ArrayJobID:|,Comment:|")
    if asked.returncode:
        raise SlurmSilent(asked.stderr.strip())
    for line in asked.stdout.splitlines():
        job_id, _, comment = line.partition("|")
        if comment.strip().rstrip("|") == name:
            return job_id.strip()
    return None


def _complaint(words: str) -> str:
    """Return what sbatch complains of, in one line: first the cause, where it names one."""
    errors = [
        line.partition("error:")[2].strip() for line in words.splitlines() if "error:" in line
    ]
    line = "sbatch: error: " + "; ".join(errors) if errors else words.partition("\n")[0]
    return f"{line}; {NO_GPUS}" if "generic resource" in line else line
