"""One task of a Slurm job: it starts the rank as its child, and records the rank's death if the rank could not.

Slurm reports that a task was killed, but not why, nor which rank was the first cause, and only in srun's output. The
parent sees its child's exit status at once and on the same node. So a rank killed by the system is named with rank and
host, and overwrites what its peers report when they lose it. The parent imports next to nothing, because it lives
beside every rank.

[Note: being asked to stop] Slurm signals parent and child alike: SIGUSR2 some time before the time limit, SIGTERM when
it ends the job (preemption, scancel, the limit itself). If the run can be requeued, the ranks agree on a step, save,
and exit with SAVED. After SIGUSR2 rank 0's task leaves a file, all tasks end, and the batch file asks Slurm to start
the job again, since Slurm's commands may be missing here, inside a container. After SIGTERM nobody asks, and the tasks
stay until they are killed: Slurm itself requeues a preempted job, unless the job ends before it is killed, which counts
as a failure; and a cancelled job that requeues itself could never be cancelled.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from zeroexp.process import ports, progress
from zeroexp.process.watchdog.hung import WatchedRank, dump_stacks
from zeroexp.process.watchdog.lost import Heartbeat, HeartbeatAddress
from zeroexp.tracking import attempt, failure
from zeroexp.tracking.mlflow_live import sender
from zeroexp.tracking.out_of_memory import kills_by_kernel
from zeroexp.training.agree_to_stop import ASKS_TO_STOP, SAVED

HEARTBEAT_AT = "ZEROEXP_HEARTBEAT"  # the host of the task of rank 0
JOB = "ZEROEXP_JOB"  # Slurm's id of the job; of an element of an array with its number, 7_2
HOSTS = "ZEROEXP_HOSTS"  # the job's hosts in Slurm's order
SECONDS_BETWEEN_SIGNALS = 1.0  # from Slurm's signal to a task's child until its signal to the task
SECONDS_TO_NOTE = 2.0  # for one query to Slurm and two small files
SIGNALLED = 128  # a shell's exit code for a signal is this plus the signal
TIME_LIMIT = "time limit of this attempt (cluster.timeout_s)"
PREEMPTED = "preempted by a job of higher priority"
ENDED = "ended by Slurm (SIGTERM)"  # by scancel, or for a reason that Slurm does not report
DUTY = "slurm/duty.json"  # in the run's folder
JOB_ID = "job_id"  # in its folder slurm: the job's id, by the batch file
CANCELLED_BY = "cancelled_by"  # in its folder slurm: why a command of ours had it cancelled
WANTS_ANOTHER = "wants-another-start"  # in its folder slurm: a file that rank 0's task leaves for the batch file


@dataclass(frozen=True)
class Duty:
    """Settings of a task, from its submitter."""

    rank_main: str  # module:function, called with (folder, device=...)
    device: str
    heartbeat_s: float
    start_s: float = 60.0
    hang_s: float | None = None  # None: a rank that hangs is not looked for
    max_requeues: int = 0  # 0: the run cannot be requeued
    sends: bool = False  # True: rank 0's task sends the steps to MLflow


def run_task(folder: Path, duty: Duty) -> NoReturn:
    """Run one rank to its end, or until another task is lost. Raises SystemExit with the rank's exit code."""
    # These are Slurm's variables; world.py, which knows them too, would import torch.
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    asked = _Asked()
    if rank == 0:
        attempt.begin(folder, attempt.own_number() or 1)
        failure.remove_older_failure(folder)
    kills = kills_by_kernel()
    child = _start_rank(folder, duty, rank)
    beside = sender(folder) if duty.sends and rank == 0 else nullcontext()
    with beside, _heartbeat(folder, duty, child, world_size) as heartbeat:
        lost = heartbeat.wait(until=lambda: _exit_superseded(folder))
        if heartbeat.hangs:
            if heartbeat.guilty:
                failure.write_hung(folder, *heartbeat.guilty)
            dump_stacks([child], heartbeat.sights)
        elif lost:
            # A task that is cut off misses rank 0's, which lives and hears the others: its word counts.
            replaces = not asked.to_end and (
                rank == 0 or not failure.failed_by_exception(folder, "TaskLost")
            )
            failure.write(folder, "TaskLost", lost, replaces=replaces)
        if lost:
            os.kill(child.pid, signal.SIGKILL)
        status = child.reap()
        if status == -signal.SIGTERM:
            asked.wait()
        if heartbeat.guilty:
            heartbeat.wait_for_goodbyes(duty.heartbeat_s)
        if status not in (0, SAVED) and not lost and not asked.to_end:
            failure.write_died(
                folder, rank, status, peak_bytes=child.peak_bytes, kills_before=kills
            )
    if status == SAVED:
        status = _leave_to_slurm(folder, duty, rank, asked)
    elif status != 0 and asked.to_end:
        _record_why_slurm_ended(folder, rank)
    raise SystemExit(status if status >= 0 else SIGNALLED - status)


def _start_rank(folder: Path, duty: Duty, rank: int) -> WatchedRank:
    """Start the rank in its own interpreter, because this one imports nothing of it."""
    command = [sys.executable, "-u", "-m", "zeroexp.cluster.rank_entry"]
    command += [duty.rank_main, str(folder), duty.device]
    log = failure.log_path(folder, rank)
    log.parent.mkdir(exist_ok=True)
    # These signals stay blocked until a rank that can stop early handles them.
    waiting = ASKS_TO_STOP if duty.max_requeues else ()
    signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    descriptor, numbers = progress.create()
    with log.open("ab") as output:  # also catches errors before the rank opens its log itself
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            pass_fds=[descriptor],
            env={**os.environ, progress.DESCRIPTOR: str(descriptor)},
        )
    os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waiting)
    child.returncode = 0  # who watches the rank reaps it
    return WatchedRank(rank, child.pid, numbers, log)


def _heartbeat(folder: Path, duty: Duty, child: WatchedRank, world_size: int) -> Heartbeat:
    file = folder / "slurm" / f"heartbeat.{attempt.own_number() or 1}"
    secret = bytes.fromhex(os.environ[ports.SECRET])
    return Heartbeat(
        child,
        world_size,
        HeartbeatAddress(os.environ[HEARTBEAT_AT], file, secret, os.environ.get(ports.RANGE)),
        duty.heartbeat_s,
        hang_seconds=duty.hang_s,
        name_of=partial(_name_of, world_size=world_size),
        start_seconds=duty.start_s,
    )


def _name_of(rank: int, world_size: int) -> str:
    """Return `rank 3 on node17` if srun fills one node after the other, which is its default; else only the rank."""
    hosts = os.environ.get(HOSTS, "").split()
    in_blocks = os.environ.get("SLURM_DISTRIBUTION", "block").startswith("block")
    if hosts and (in_blocks or len(hosts) == world_size):
        return f"rank {rank} on {hosts[rank * len(hosts) // world_size]}"
    return f"rank {rank}"


def _exit_superseded(folder: Path) -> str | None:
    """Return a message once a later attempt has begun, which makes this task and its rank leftovers."""
    try:
        attempt.refuse_superseded(folder)
    except attempt.Superseded as outdated:
        return str(outdated)
    return None


def _leave_to_slurm(folder: Path, duty: Duty, rank: int, asked: _Asked) -> int:
    """Return the exit code at the time limit; else stay until killed, see [Note: being asked to stop]."""
    if asked.to_end:
        _record_why_slurm_ended(folder, rank)
        while True:
            time.sleep(1)
    if rank == 0:
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if restarts >= duty.max_requeues:
            refusal = f"it was {restarts} times (cluster.slurm.max_requeues={duty.max_requeues})"
            attempt.end(folder, f"{TIME_LIMIT}; not requeued: {refusal}")
        else:
            attempt.end(folder, TIME_LIMIT)
            (folder / "slurm" / WANTS_ANOTHER).touch()
    return 0


def _record_why_slurm_ended(folder: Path, rank: int) -> None:
    """Record that Slurm ended the attempt, and why as soon as it answers, for it forgets a preemption."""
    if rank == 0:
        with suppress(attempt.Superseded):
            attempt.end(folder, ENDED)
            if _is_preempted():
                attempt.end(folder, PREEMPTED)
    else:
        time.sleep(SECONDS_TO_NOTE)  # srun kills rank 0's task as soon as another has failed


def _is_preempted() -> bool:
    """Ask Slurm whether this job is being preempted. In a container without squeue nobody knows."""
    command = ["squeue", "--noheader", f"--jobs={os.environ[JOB]}"]
    try:
        answer = subprocess.run(
            [*command, "--Format=PreemptTime:20"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError:
        return False
    return answer.stdout.strip() not in ("", "N/A")


class _Asked:
    """Has Slurm asked the job to end? It signals parent and child alike, so their ends are no rank's failure."""

    def __init__(self) -> None:
        self.to_end = False
        signal.signal(signal.SIGTERM, self._on_signal)
        # The ranks answer SIGUSR2, all together or not at all.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def wait(self) -> None:
        """Wait for Slurm's signal, which may reach the child, and kill it, before it reaches this process."""
        until = time.monotonic() + SECONDS_BETWEEN_SIGNALS
        while not self.to_end and time.monotonic() < until:
            time.sleep(0.01)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.to_end = True


def main() -> NoReturn:
    """Run a task: `python -m zeroexp.cluster.task <folder>`."""
    folder = Path(sys.argv[1])
    run_task(folder, Duty(**json.loads((folder / DUTY).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
