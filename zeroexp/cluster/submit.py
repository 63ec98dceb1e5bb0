"""Hand a batch file to sbatch, through submitit, and find out which job it became, also when sbatch does not say.

sbatch may time out after Slurm has queued the job, and the submitter may be killed between sbatch and the note of the
job's id. So each submission has a name of ours, which is the job's comment and is noted in the run's folder
before sbatch starts. Whoever looks at the run later finds its job by that name (`adopt`).
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from zeroexp.cluster.batch import BATCH_FILE
from zeroexp.cluster.slurm_state import SlurmSilent, _run_slurm_command
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
    file.write_text(text, encoding="utf-8")
    return file


def _submit(notes: Mapping[Path, dict[str, Any]], file: Path, name: str) -> str:
    """Note in these folders what is about to be submitted, and submit it; return its id."""
    for folder, content in notes.items():
        write_json(folder / SUBMITTING, content)
    job_id, words = _sbatch(file, name)
    if job_id is None and (not words or UNSURE.search(words)):
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
    write_json(folder / SLURM_FILE, content)
    (folder / SUBMITTING).unlink(missing_ok=True)


def adopt(folder: Path) -> str | None:
    """Return the id of a job that this folder's submitter did not live to note; None if Slurm knows of none."""
    submitting = read_json(folder / SUBMITTING)
    found = _find(submitting["name"]) if submitting else None
    if submitting and found and "element" in submitting:
        return f"{found}_{submitting['element']}"
    return found


class _Executor(SlurmExecutor):
    """submitit's executor, which is given the whole batch file.

    The file that submitit writes has no step after srun, and ours decides there whether the job starts again. What is
    overridden and called here is private in submitit, so that pyproject.toml bounds its version from above.
    """

    def __init__(self, folder: Path, text: str) -> None:
        super().__init__(folder)
        self._text = text

    @classmethod
    def affinity(cls) -> int:
        return 1  # a machine without srun hears of it from sbatch

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._text

    def hand_over(self) -> str:
        """Submit the batch file and return the job's id."""
        return self._submit_command("").job_id


@contextmanager
def outside_of_jobs() -> Iterator[None]:
    """Hide from sbatch what an interactive job or step of Slurm has set in the environment.

    sbatch hands its environment on to the job, where such variables would bind, size or name the ranks' step.
    """
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    hidden = {
        key: os.environ.pop(key)
        for key in list(os.environ)
        if key not in kept and key.startswith(("SLURM_", "SLURMD_", "PMI_", "PMIX_", "PMI2_"))
    }
    try:
        yield
    finally:
        os.environ.update(hidden)


def _sbatch(file: Path, name: str) -> tuple[str | None, str]:
    """Return the job's id, or None and sbatch's words."""
    first, rest = file.read_text(encoding="utf-8").split("\n", 1)
    text = f"{first}\n#SBATCH --comment={shlex.quote(name)}\n{rest}"
    with outside_of_jobs(), redirect_stderr(StringIO()):  # submitit prints what it also raises
        try:
            return _Executor(file.parent, text).hand_over(), ""
        except FileNotFoundError:
            return None, "error: this machine has no sbatch"
        except (FailedJobError, FailedSubmissionError) as error:
            return None, str(error).strip()


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
    asked = _run_slurm_command(
        "squeue", user, "--noheader", "--states=all", "--Format=ArrayJobID:|,Comment:|"
    )
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
    if not words:
        return "sbatch was killed, or ended without a word, and no job of it was found; try again"
    line = "sbatch: error: " + "; ".join(errors) if errors else words.partition("\n")[0]
    return f"{line}; {NO_GPUS}" if "generic resource" in line else line
