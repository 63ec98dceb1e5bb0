"""The batch file of a job: what it asks Slurm for, the environment of its ranks, and its end. submitit writes it.

    sbatch ──▶ batch file, on the first node ── srun ──▶ python -m zeroexp.cluster.task, on every node
                                             ◀─ end ──   then: is the job to start again?

[Note: the end] Only the batch file is certain to run outside of containers, where Slurm's commands are. So rank 0's
task leaves a file when the ranks have saved because the time limit is near, and the batch file asks Slurm to start the
job again. Both a requeued and a preempted job must not end before they are killed: Slurm would count them as ended.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from zeroexp.cluster.code_snapshot import snapshot_code
from zeroexp.cluster.job import Job
from zeroexp.cluster.local import RANK_MAIN, thread_variables
from zeroexp.cluster.slurm_state import NO_ANSWER
from zeroexp.cluster.task import (
    HEARTBEAT_AT,
    HOSTS,
    JOB,
    JOB_ID,
    PREEMPTED,
    TIME_LIMIT,
    WANTS_ANOTHER,
)
from zeroexp.config import plugins
from zeroexp.config.job_shape import JobShape
from zeroexp.config.keys import ClusterConfig
from zeroexp.process.ports import RANGE, SCHEME, SECRET
from zeroexp.tracking import attempt, failure
from zeroexp.tracking.files import working_folder_of
from zeroexp.tracking.run import SLURM_FILE

ELEMENT = "batch.sh"  # of a run that is an element of a job array, in its folder slurm
ASKS_FOR_GPUS = {"gres", "gpus", "gpus_per_node", "gpus_per_task", "tres_per_task"}
SUBMITITS_OWN = ("job_name", "nodes", "time", "wckey")  # which have a value unless they are None


class BatchFile(SlurmExecutor):
    """The batch file of one job in the folder of its logs. All private members of submitit are used here, so that
    pyproject.toml bounds its version.
    """

    def __init__(
        self, folder: Path, asks: dict[str, Any], setup: list[str], command: str, **more: Any
    ) -> None:
        """asks: options of sbatch; setup: lines before the command, which srun starts unless `more` says no."""
        super().__init__(folder)
        self._command = command
        more |= {key: asks.get(key) for key in SUBMITITS_OWN}
        self.update_parameters(setup=setup, additional_parameters=asks, **more)

    @classmethod
    def affinity(cls) -> int:
        return 1  # a machine without srun hears of it from sbatch, and can print the file

    def text(self) -> str:
        """What a dry run prints and an element of a job array runs; submitit shows its text to sbatch alone."""
        return self._make_submission_file_text(self._command, "")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        """Return sbatch with the file's options as arguments, because SBATCH_ACCOUNT and its like win over the file."""
        # What the lines of a site ask for is a comment.
        head, _, _ = self.text().partition("\n# setup\n")
        lines = [line for line in head.splitlines() if line.startswith("#SBATCH ")]
        options = [option for line in lines for option in shlex.split(line)[1:]]
        return ["sbatch", *options, str(submission_file_path)]

    def submit(self, comment: str) -> tuple[str | None, str]:
        """Submit the file; return the job's id, or None and sbatch's words.

        With submitit's `submit` the tasks would wait for a file that is named after the id, and a submitter that is
        killed before it knows the id would leave a job that fails.
        """
        self.update_parameters(comment=comment)
        with _outside_of_jobs(), redirect_stderr(StringIO()):  # submitit prints what it also raises
            try:
                return self._submit_command(self._command).job_id, ""
            except FileNotFoundError:
                return None, "error: this machine has no sbatch"
            except (FailedJobError, FailedSubmissionError) as error:
                return None, str(error).strip()


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
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


def batch_file(job: Job, rank_main: str = RANK_MAIN) -> BatchFile:
    config, folder = job.config.cluster, job.folder.resolve()
    python = config.slurm.python or shlex.quote(sys.executable)
    return BatchFile(
        folder / "slurm",
        _asks(job, config, _name(job)),
        [*_export_lines(job, config), *_site_lines(config.slurm.setup)],
        f"{python} -u -m zeroexp.cluster.task {shlex.join([rank_main, str(folder)])}",
        srun_args=[
            "--kill-on-bad-exit=1",
            # srun no longer takes it from the job since Slurm 22.05: binding to cores would leave each rank one.
            f"--cpus-per-task={config.slurm.cpus_per_rank}",
            "--mpi=none",  # the ranks use none, whatever the site's default is
            *config.slurm.srun,
        ],
        teardown=_end_lines(folder / "slurm") if config.max_requeues else None,
    )


def array_file(jobs: Sequence[Job]) -> BatchFile:
    """Return the batch file of a job array; its element i runs the ELEMENT of the i-th of these jobs of one shape."""
    first, config = jobs[0].folder.resolve(), jobs[0].config.cluster
    unlimited = replace(config.slurm, max_running=None)  # the array itself has the limit
    asks = _asks(jobs[0], replace(config, slurm=unlimited), first.parent.name)
    asks = {key: value for key, value in asks.items() if key != "error"}
    most = f"%{config.slurm.max_running}" if config.slurm.max_running else ""
    asks |= {"array": f"0-{len(jobs) - 1}{most}", "output": "/dev/null"}
    folders = [shlex.quote(str(job.folder.resolve() / "slurm")) for job in jobs]
    lines = [
        f"runs=({' '.join(folders)})",
        "run=${runs[$SLURM_ARRAY_TASK_ID]}",
        "logs=$run/${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}_batch",
    ]
    command = f'exec bash "$run/{ELEMENT}" >> "$logs.out" 2>> "$logs.err"'
    return BatchFile(first / "slurm", asks, lines, command, use_srun=False, stderr_to_stdout=True)


def element_text(job: Job, rank_main: str) -> str:
    """Return the ELEMENT of a run; logs of its ranks are named by the array and the element, as the job is."""
    return batch_file(job, rank_main).text().replace("/%j_%t_log", "/%A_%a_%t_log")


def _name(job: Job) -> str:
    """Return the job's name; max_running limits the number of names, and Slurm runs one job of a name at a time."""
    sweep, slots = job.folder.parent, job.config.cluster.slurm.max_running
    num_submitted = len(list(sweep.glob(f"*/{SLURM_FILE}"))) if slots else 0
    return f"{sweep.name}-{num_submitted % slots}" if slots else f"{sweep.name}-{job.name}"


def _asks(job: Job, config: ClusterConfig, name: str) -> dict[str, Any]:
    """Return the options of sbatch, `_` for `-`; the site's own come last, and null or false removes one of ours."""
    site, shape = config.slurm, JobShape.of(job.config.world_size, config.slurm.ranks_per_node)
    own = {key.replace("-", "_"): value for key, value in site.sbatch.items()}
    gpus = config.device == "cuda" and not own.keys() & ASKS_FOR_GPUS
    if site.max_running and own.get("dependency"):
        own["dependency"] = f"{own['dependency']},singleton"  # a comma: both
    asks = {
        "job_name": name,
        "nodes": shape.nodes,
        "ntasks_per_node": shape.ranks_per_node,
        "cpus_per_task": site.cpus_per_rank,
        "gpus_per_node": shape.ranks_per_node if gpus else None,
        "mem": None if site.memory_gb is None else f"{math.ceil(site.memory_gb * 1024)}M",
        "time": math.ceil(config.timeout_s / 60),  # minutes
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "dependency": "singleton" if site.max_running else None,
        "signal": f"USR2@{site.save_s}",  # tasks ignore it if there is nothing to save
        "requeue" if config.max_requeues else "no_requeue": True,
        "output": f"{job.folder.resolve()}/slurm/%j_batch.out",
        "error": f"{job.folder.resolve()}/slurm/%j_batch.err",
        **own,
    }
    return {key: value for key, value in asks.items() if value is not None and value is not False}


def _export_lines(job: Job, config: ClusterConfig) -> list[str]:
    """Return shell lines that run once per attempt, on the first node, before srun.

    They also say where tasks and ranks meet, and draw the secret of the job, which stands in no file: the environment
    of a process is readable by its user alone.
    """
    folder = job.folder.resolve()
    if given_in := working_folder_of(folder):
        plugins.add_import_folder(given_in)
    snapshot = str(snapshot_code(folder.parent, job.config.plugins))
    exports = {
        "PYTHONPATH": os.pathsep.join(filter(None, [snapshot, os.environ.get("PYTHONPATH")])),
        # Without this, `python -m` finds the edited tree before the snapshot.
        "PYTHONSAFEPATH": "1",
        **thread_variables(config),
        **({RANGE: config.slurm.ports} if config.slurm.ports else {}),
    }
    one_node = JobShape.of(job.config.world_size, config.slurm.ranks_per_node).nodes == 1
    host = "127.0.0.1" if one_node else f"${{{HOSTS}%%[[:space:]]*}}"
    restarts = "${SLURM_RESTART_COUNT:-0}"
    lines = [
        # The last would keep these exports from the tasks, where a site or user has SBATCH_EXPORT=NONE.
        "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT SLURM_EXPORT_ENV",
        "unset ${!SQUEUE_*} ${!SCONTROL_*}",  # the user's, which would hide the job from itself
        *(f"export {key}={shlex.quote(value)}" for key, value in exports.items()),
        # The last element of an array has the array's id as its own, by which Slurm means all elements.
        f"export {JOB}=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}",
        f"echo ${JOB} > {shlex.quote(f'{folder}/slurm/{JOB_ID}')}",
        f'export {HOSTS}="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"',
        f"export {attempt.NUMBER}=$(({attempt.newest(folder) + 1} + {restarts}))",
        f"export {SECRET}=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        f"export {HEARTBEAT_AT}={host}",
        f"export ZEROEXP_RENDEZVOUS={SCHEME}${HEARTBEAT_AT}"
        f"{shlex.quote(f'{folder}/slurm/rendezvous')}.${attempt.NUMBER}",
    ]
    if one_node:
        lines.append("export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}")
    if most := config.max_requeues:  # the last attempt is not requeued even if a node is lost
        more = f"[ {restarts} -lt {most} ]"
        lines.append(f"{more} || scontrol update JobId=${JOB} Requeue=0")
        # They may be of an attempt before this one, which may end before its tasks begin.
        of_older = (f"{folder}/slurm/{WANTS_ANOTHER}", f"{folder}/{failure.FAILURE}")
        lines.append(f"rm -f {shlex.join(of_older)}")
    return lines


def _site_lines(lines: list[str]) -> list[str]:
    """Return the site's lines; one that fails ends the job with a line that names it."""
    if not lines:
        return []
    words = 'zeroexp: cluster.slurm.setup: exit code $? of: $(sed -n "${LINENO}p" "$0")'
    return [f"trap 'echo \"{words}\" >&2; exit 1' ERR", *lines, "trap - ERR"]


def _end_lines(slurm: Path) -> list[str]:
    """Return shell lines that start the job again if its ranks want it, see [Note: the end]."""
    preempted = f"ask squeue --noheader --jobs=${JOB} --Format=PreemptTime:20"
    silent = shlex.quote(f"{NO_ANSWER}|connect failure")
    return [
        "code=$?",
        f"asked={shlex.quote(str(slurm))}/{WANTS_ANOTHER}",
        f"ended={shlex.quote(str(slurm))}/ended${attempt.NUMBER}",
        "wait_to_be_killed() { while sleep 60; do :; done; }",
        f"silent={silent}",
        # A controller that is away comes back, and until Slurm kills the job there is time.
        'ask() { until words=$("$@" 2>&1); do [[ $words =~ $silent ]] || return 1; sleep 5; done; }',
        'if [ -e "$asked" ]; then',
        '    rm "$asked"',
        # The last line: a warning may stand before it.
        f"    if {preempted} && [[ ${{words##*$'\\n'}} =~ [0-9] ]]; then",
        f'        echo {shlex.quote(PREEMPTED)} > "$ended"; wait_to_be_killed',
        "    fi",
        # It is already, where the answer to the first request was lost.
        f'    {{ ask scontrol requeue "${JOB}" || [[ $words =~ already ]]; }} && wait_to_be_killed',
        f'    echo "{TIME_LIMIT}; not requeued: $words" > "$ended"',
        "fi",
        "exit $code",
    ]
