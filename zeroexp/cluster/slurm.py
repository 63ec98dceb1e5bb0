"""A Slurm cluster: one job per point, each with its own nodes, tasks and time.

    sweep ── submit ──▶ sbatch: batch.py's file ── srun ──▶ task.py on every task ──▶ rank.main
          ◀── files of the run folder, squeue, sacct (slurm_state.py, follow.py) ──

Only jobs of runs that save checkpoints are requeued: another run would start from the beginning unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from zeroexp.cluster.batch import array_file, batch_file, max_requeues
from zeroexp.cluster.job import Job
from zeroexp.cluster.live import sends_live
from zeroexp.cluster.local import RANK_MAIN
from zeroexp.cluster.submit import note, submit, submit_array
from zeroexp.cluster.task import DUTY, Duty
from zeroexp.config.keys import ClusterConfig
from zeroexp.plan.machines import JobShape
from zeroexp.tracking.files import write_json

# As many more ranks read the same files, so that cluster.start_s is given them once more.
RANKS_THAT_START_TOGETHER = 256


class SlurmCluster:
    def __init__(self, config: ClusterConfig, *, rank_main: str = RANK_MAIN) -> None:
        self._config = config
        self._rank_main = rank_main
        self._num_submitted = 0

    def submit(self, job: Job) -> str:
        """Submit a run folder to Slurm; return the job id, which is also written into its slurm.json.

        Raises ConfigError with sbatch's message if Slurm refuses, and Later if it would take the job another time.
        """
        self._prepare(job)
        job_id = submit(job.folder, self.script(job))
        self._note(job, job_id)
        return job_id

    def submit_array(self, jobs: Sequence[Job]) -> None:
        """Submit run folders of one shape as a job array. Raises what `submit` raises; then none is submitted."""
        for job in jobs:
            self._prepare(job)
        texts = {job.folder: self.script(job) for job in jobs}
        for job, job_id in zip(jobs, submit_array(texts, self.array_script(jobs)), strict=True):
            self._note(job, job_id)

    def array_script(self, jobs: Sequence[Job]) -> str:
        """Return the batch file that `submit_array` hands over; it runs those of the jobs."""
        return array_file(jobs, self._config, jobs[0].folder.parent.name)

    def _prepare(self, job: Job) -> None:
        (job.folder / "slurm").mkdir(exist_ok=True)
        write_json(job.folder / DUTY, asdict(self._duty(job)))

    def _note(self, job: Job, job_id: str) -> None:
        self._num_submitted += 1
        shape = JobShape.of(job.config.world_size, self._config.slurm.ranks_per_node)
        note(job.folder, job_id, shape.nodes, shape.ranks_per_node)

    def script(self, job: Job) -> str:
        """Return the batch file that `submit` hands over."""
        return batch_file(job, self._config, self._job_name(job))

    def _duty(self, job: Job) -> Duty:
        config = self._config
        return Duty(
            self._rank_main,
            config.device,
            config.heartbeat_s,
            config.start_s * (1 + job.config.world_size / RANKS_THAT_START_TOGETHER),
            config.hang_s,
            max_requeues(config),
            sends_live(job.config.tracking),
        )

    def _job_name(self, job: Job) -> str:
        """Return the job's name; max_running limits the number of names, and Slurm runs one job of a name at a time."""
        sweep, slots = job.folder.parent.name, self._config.slurm.max_running
        return f"{sweep}-{self._num_submitted % slots}" if slots else f"{sweep}-{job.name}"
