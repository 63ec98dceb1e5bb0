"""A Slurm cluster: one job per point, each with its own nodes, tasks and time. Only this file imports submitit.

    sweep ── submit ──▶ sbatch: setup, then srun ──▶ task.run_task on every task ──▶ rank.main
          ◀── files of the run folder, squeue, sacct (slurm_state.py, follow.py) ──

submitit writes the batch file and carries the call. Its results and its view of a job's state are not used, since they
wait forever on sites without accounting. Only jobs of runs that save checkpoints are requeued: another run would start
from the beginning unnoticed.
"""

from __future__ import annotations

import math
import os
import shlex

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from zeroexp.cluster.job import Job
from zeroexp.cluster.live import sends_live
from zeroexp.cluster.local import RANK_MAIN
from zeroexp.cluster.snapshot import take_snapshot
from zeroexp.cluster.task import HEARTBEAT_AT, HOSTS, Duty, run_task
from zeroexp.config import ClusterConfig, ConfigError
from zeroexp.plan.place import Shape
from zeroexp.tracking import attempt
from zeroexp.tracking.json_files import write_json
from zeroexp.tracking.run import SLURM

# Ports are derived from the job id, below the ports that systems assign themselves.
NUM_PORTS = 10_000
HEARTBEAT_PORT, RENDEZVOUS_PORT = 10_000, 20_000

NO_GPUS = (
    "its nodes have no such GPUs: use cluster.device=cpu, fewer ranks_per_node or another partition"
)


class _BatchFile(SlurmExecutor):
    """submitit's executor without its refusal to write a batch file on a machine without srun: a dry run needs none."""

    @classmethod
    def affinity(cls) -> int:
        return 1

    def text(self) -> str:
        return self._make_submission_file_text(self._submitit_command_str, "dry_run")


class SlurmCluster:
    def __init__(self, config: ClusterConfig, *, rank_main: str = RANK_MAIN) -> None:
        self._config = config
        self._rank_main = rank_main
        self._num_submitted = 0

    def submit(self, job: Job) -> str:
        """Submit a run folder to Slurm; return the job id, which is also written into its slurm.json.

        Raises ConfigError with sbatch's message if Slurm refuses.
        """
        world_size = job.config.world_size
        executor = self._executor(job, world_size)
        duty = Duty(
            job.folder.resolve(),
            self._rank_main,
            self._config.device,
            self._config.heartbeat_s,
            self._config.hang_s,
            self._max_requeues,
            sends_live(job.config.tracking),
        )
        try:
            job_id = executor.submit(run_task, duty).job_id
        except (FailedJobError, FailedSubmissionError) as error:
            raise ConfigError(f"cluster.slurm: {_words_of_sbatch(error)}") from error
        self._num_submitted += 1
        shape = Shape.of(world_size, self._config.slurm.ranks_per_node)
        content = {"job_id": job_id, "nodes": shape.nodes, "ranks_per_node": shape.ranks_per_node}
        write_json(job.folder / SLURM, content)
        return job_id

    def script(self, job: Job) -> str:
        """Return the batch file that `submit` would hand over."""
        return self._executor(job, job.config.world_size).text()

    def _executor(self, job: Job, world_size: int) -> _BatchFile:
        config, site = self._config, self._config.slurm
        shape = Shape.of(world_size, site.ranks_per_node)
        executor = _BatchFile(job.folder.resolve() / "slurm", python=site.python)
        executor.update_parameters(
            job_name=self._job_name(job),
            nodes=shape.nodes,
            ntasks_per_node=shape.ranks_per_node,
            gpus_per_node=shape.ranks_per_node if config.device == "cuda" else None,
            cpus_per_task=site.cpus_per_rank,
            mem=None if site.memory_gb is None else f"{math.ceil(site.memory_gb * 1024)}M",
            time=math.ceil(config.timeout_s / 60),  # minutes
            partition=site.partition,
            account=site.account,
            qos=site.qos,
            constraint=site.constraint,
            comment=job.name,
            wckey=None,
            dependency="singleton" if site.max_running else None,
            signal_delay_s=site.save_s,  # tasks ignore the signal if there is nothing to save
            setup=self._setup(job),
            srun_args=["--kill-on-bad-exit=1", *site.srun],
            additional_parameters={
                "requeue" if self._max_requeues else "no-requeue": True,
                **site.sbatch,
            },
        )
        return executor

    @property
    def _max_requeues(self) -> int:
        return self._config.slurm.max_requeues if self._config.requeue else 0

    def _job_name(self, job: Job) -> str:
        """Return the job's name; max_running limits the number of names, and Slurm runs one job of a name at a time."""
        sweep, slots = job.folder.parent.name, self._config.slurm.max_running
        return f"{sweep}-{self._num_submitted % slots}" if slots else f"{sweep}-{job.name}"

    def _setup(self, job: Job) -> list[str]:
        """Return shell lines that run once per attempt, on the first node, before srun."""
        threads = self._config.threads_per_rank
        snapshot = str(take_snapshot(job.folder.parent.resolve()))
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
        return [
            "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT",
            *(f"export {name}={shlex.quote(str(value))}" for name, value in exports.items()),
            f"export {HOSTS}={hosts}",
            f"first_node=${{{HOSTS}%%[[:space:]]*}}",
            f"export ZEROEXP_RENDEZVOUS=tcp://$first_node:{_port(RENDEZVOUS_PORT)}",
            f"export {HEARTBEAT_AT}=$first_node:{_port(HEARTBEAT_PORT)}",
            *self._attempt(job),
            *self._config.slurm.setup,
        ]

    def _attempt(self, job: Job) -> list[str]:
        """Return shell lines that number the attempt, and that keep Slurm from requeueing the last one.

        The number adds Slurm's count of restarts to our count of earlier attempts. The last attempt tells Slurm not to
        requeue it, even if a node is lost.
        """
        restarts = "${SLURM_RESTART_COUNT:-0}"
        number = f"export {attempt.NUMBER}=$(({attempt.newest(job.folder) + 1} + {restarts}))"
        if not self._max_requeues:
            return [number]
        more = f"[ {restarts} -lt {self._max_requeues} ]"
        return [number, f"{more} || scontrol update JobId=$SLURM_JOB_ID Requeue=0"]


def _port(first: int) -> str:
    """Return shell arithmetic for a port; jobs that share a node get different ports."""
    return f"$(({first} + SLURM_JOB_ID % {NUM_PORTS}))"


def _words_of_sbatch(error: Exception) -> str:
    """Extract sbatch's error line from submitit's message."""
    lines = [line.strip() for line in str(error).splitlines() if "error:" in line]
    words = lines[-1] if lines else str(error).partition("\n")[0]
    return f"{words}; {NO_GPUS}" if "generic resource" in words else words
