"""The batch file of one job: what it asks Slurm for, the environment of its ranks, and its end.

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
from collections.abc import Sequence
from typing import Any

from zeroexp.cluster.job import Job
from zeroexp.cluster.snapshot import take_snapshot
from zeroexp.cluster.task import HEARTBEAT_AT, HOSTS, PREEMPTED, TIME_LIMIT, WANTS_ANOTHER
from zeroexp.config import plugins
from zeroexp.config.keys import ClusterConfig
from zeroexp.plan.machines import JobShape
from zeroexp.process.ports import RANGE, SCHEME, SECRET
from zeroexp.tracking import attempt
from zeroexp.tracking.files import working_folder_of

BATCH_FILE = "batch.sh"  # in the folder slurm of a run
ASKS_FOR_GPUS = {"gres", "gpus", "gpus-per-node", "gpus-per-task", "tres-per-task"}


def batch_file(job: Job, config: ClusterConfig, name: str) -> str:
    """Return the text that sbatch is given; `name` is the job's."""
    shape = JobShape.of(job.config.world_size, config.slurm.ranks_per_node)
    sections = {
        "what the job takes": _directives(job, config, shape, name),
        "what its ranks find": _export_lines(job, config),
        "the site's own lines": _setup_lines(config.slurm.setup),
        "the ranks": [_srun_lines(job, config)],
        "the end": _end_lines(job) if max_requeues(config) else ["exit $code"],
    }
    lines = [line for title, part in sections.items() for line in (f"# {title}", *part, "")]
    return "\n".join(["#!/bin/bash", *lines])


def array_file(jobs: Sequence[Job], config: ClusterConfig, name: str) -> str:
    """Return the text of a job array in which element i runs the batch file of the i-th of these jobs of one shape."""
    shape = JobShape.of(jobs[0].config.world_size, config.slurm.ranks_per_node)
    replaced = ("--output=", "--error=", "--dependency=")
    asks = [
        line
        for line in _directives(jobs[0], config, shape, name)
        if not line.removeprefix("#SBATCH ").startswith(replaced)
    ]
    most = f"%{config.slurm.max_running}" if config.slurm.max_running else ""
    asks += [f"#SBATCH --array=0-{len(jobs) - 1}{most}", "#SBATCH --output=/dev/null"]
    lines = ["this=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID", "case $SLURM_ARRAY_TASK_ID in"]
    for index, job in enumerate(jobs):
        lines.append(f"    {index}) run={shlex.quote(str(job.folder.resolve() / 'slurm'))} ;;")
    lines += [
        "esac",
        f'exec bash "$run/{BATCH_FILE}" >> "$run/${{this}}_batch.out" 2>> "$run/${{this}}_batch.err"',
    ]
    return "\n".join(["#!/bin/bash", *asks, "", *lines, ""])


def max_requeues(config: ClusterConfig) -> int:
    return config.slurm.max_requeues if config.requeue else 0


def _directives(job: Job, config: ClusterConfig, shape: JobShape, name: str) -> list[str]:
    site, logs = config.slurm, job.folder.resolve() / "slurm"
    asks: dict[str, Any] = {
        "job-name": name,
        "nodes": shape.nodes,
        "ntasks-per-node": shape.ranks_per_node,
        "cpus-per-task": site.cpus_per_rank,
        "gpus-per-node": shape.ranks_per_node if config.device == "cuda" else None,
        "mem": None if site.memory_gb is None else f"{math.ceil(site.memory_gb * 1024)}M",
        "time": math.ceil(config.timeout_s / 60),  # minutes
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "dependency": "singleton" if site.max_running else None,
        "signal": f"USR2@{site.save_s}",  # tasks ignore it if there is nothing to save
        "requeue" if max_requeues(config) else "no-requeue": True,
        "output": f"{logs}/%j_batch.out",
        "error": f"{logs}/%j_batch.err",
        "open-mode": "append",
    }
    own = {key.replace("_", "-"): value for key, value in site.sbatch.items()}
    if own.keys() & ASKS_FOR_GPUS:
        del asks["gpus-per-node"]
    return [
        f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}"
        for key, value in {**asks, **own}.items()
        if value is not None and value is not False
    ]


def _export_lines(job: Job, config: ClusterConfig) -> list[str]:
    """Return shell lines that run once per attempt, on the first node, before srun."""
    threads, folder = config.threads_per_rank, job.folder.resolve()
    if given_in := working_folder_of(folder):
        plugins.look_in(given_in)
    snapshot = str(take_snapshot(folder.parent, job.config.plugins))
    exports = {
        "PYTHONPATH": os.pathsep.join(filter(None, [snapshot, os.environ.get("PYTHONPATH")])),
        # Without this, `python -m` finds the edited tree before the snapshot.
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": 1,
        "TOKENIZERS_PARALLELISM": "false",
    }
    hosts = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST")"'
    restarts = "${SLURM_RESTART_COUNT:-0}"
    number = f"export {attempt.NUMBER}=$(({attempt.newest(folder) + 1} + {restarts}))"
    lines = [
        "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT",
        *(f"export {key}={shlex.quote(str(value))}" for key, value in exports.items()),
        f"export {HOSTS}={hosts}",
        f"first_node=${{{HOSTS}%%[[:space:]]*}}",
        number,
        *_rendezvous_lines(job, config),
    ]
    if most := max_requeues(config):  # the last attempt is not requeued even if a node is lost
        more = f"[ {restarts} -lt {most} ]"
        lines.append(f"{more} || scontrol update JobId=$SLURM_JOB_ID Requeue=0")
    return lines


def _rendezvous_lines(job: Job, config: ClusterConfig) -> list[str]:
    """Return shell lines that say where tasks and ranks meet, and draw what only they know.

    The secret stands in no file: the environment of a process is readable by its user alone.
    """
    file = shlex.quote(str(job.folder.resolve() / "slurm" / "rendezvous"))
    one_node = JobShape.of(job.config.world_size, config.slurm.ranks_per_node).nodes == 1
    host = "127.0.0.1" if one_node else "$first_node"
    return [
        f"export {SECRET}=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        f"export {HEARTBEAT_AT}={host}",
        f"export ZEROEXP_RENDEZVOUS={SCHEME}{host}{file}.${attempt.NUMBER}",
        *([f"export {RANGE}={config.slurm.ports}"] if config.slurm.ports else []),
        *(["export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}"] if one_node else []),
    ]


def _setup_lines(lines: list[str]) -> list[str]:
    """Return the site's lines; one that fails ends the job with a line that names it."""
    if not lines:
        return []
    words = 'zeroexp: cluster.slurm.setup: exit code $? of: $(sed -n "${LINENO}p" "$0")'
    return [f"trap 'echo \"{words}\" >&2; exit 1' ERR", *lines, "trap - ERR"]


def _srun_lines(job: Job, config: ClusterConfig) -> str:
    """Return the line that starts the ranks.

    srun no longer takes the number of CPUs from the job since Slurm 22.05: without it, binding to cores gives each rank
    one core, however many threads it has. The ranks use no MPI, whatever the site's default is.
    """
    folder, site = job.folder.resolve(), config.slurm
    srun = ["srun", "--unbuffered", "--kill-on-bad-exit=1", f"--cpus-per-task={site.cpus_per_rank}"]
    srun += ["--mpi=none", f"--output={folder}/slurm/%j_%t_log.out"]
    srun += [f"--error={folder}/slurm/%j_%t_log.err", *site.srun]
    python = site.python or shlex.quote(sys.executable)
    return f"{shlex.join(srun)} {python} -u -m zeroexp.cluster.task {shlex.quote(str(folder))}; code=$?"


def _end_lines(job: Job) -> list[str]:
    """Return shell lines that start the job again if its ranks want it, see [Note: the end]."""
    slurm = shlex.quote(str(job.folder.resolve() / "slurm"))
    preempted = "squeue --noheader --jobs=$SLURM_JOB_ID --Format=PreemptTime:20 | grep -q '[0-9]'"
    return [
        f"asked={slurm}/{WANTS_ANOTHER}",
        f"ended={slurm}/ended${attempt.NUMBER}",
        "wait_to_be_killed() { while sleep 60; do :; done; }",
        'if [ -e "$asked" ]; then',
        '    rm "$asked"',
        f"    if {preempted}; then",
        f'        echo {shlex.quote(PREEMPTED)} > "$ended"; wait_to_be_killed',
        "    fi",
        '    words=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) && wait_to_be_killed',
        f'    echo "{TIME_LIMIT}; not requeued: $words" > "$ended"',
        "fi",
        "exit $code",
    ]
