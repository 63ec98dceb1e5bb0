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

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from zeroexp.config.keys import ClusterConfig, load
from zeroexp.process import ports, progress
from zeroexp.process.watchdog.hung import WatchedRank, dump_stacks
from zeroexp.process.watchdog.lost import Heartbeat, HeartbeatAddress
from zeroexp.tracking import attempt, failure
from zeroexp.tracking.mlflow_live import sender, sends_live
from zeroexp.tracking.out_of_memory import kills_by_kernel
from zeroexp.training.agree_to_stop import ASKS_TO_STOP, SAVED, Stop

HEARTBEAT_AT = "ZEROEXP_HEARTBEAT"  # the host of the task of rank 0
JOB = "ZEROEXP_JOB"  # Slurm's id of the job; of an element of an array with its number, 7_2
HOSTS = "ZEROEXP_HOSTS"  # the job's hosts in Slurm's order
# As many more ranks read the same files, so that cluster.start_s is given them once more.
RANKS_THAT_START_TOGETHER = 256
SECONDS_BETWEEN_SIGNALS = 1.0  # from Slurm's signal to a task's child until its signal to the task
SECONDS_TO_NOTE = 2.0  # for one query to Slurm and two small files
SIGNALLED = 128  # a shell's exit code for a signal is this plus the signal
TIME_LIMIT = "time limit of this attempt (cluster.timeout_s)"
PREEMPTED = "preempted by a job of higher priority"
ENDED = "ended by Slurm (SIGTERM)"  # by scancel, or for a reason that Slurm does not report
JOB_ID = "job_id"  # in its folder slurm: the job's id, by the batch file
CANCELLED_BY = "cancelled_by"  # in its folder slurm: why a command of ours had it cancelled
WANTS_ANOTHER = "wants-another-start"  # in its folder slurm: a file that rank 0's task leaves for the batch file


def run_task(folder: Path, rank_main: str) -> NoReturn:
    """Run one rank to its end, or until another task is lost. Raises SystemExit with the rank's exit code.

    rank_main: what the rank does, module:function, called with (folder, device=...).
    """
    config = load(folder / "config.yaml")
    cluster = config.cluster
    # These are Slurm's variables; world.py, which knows them too, would import torch.
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    stop = Stop()  # Slurm signals parent and child alike, so that their ends are no rank's failure
    stop.listen(signal.SIGTERM)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # ranks answer it, all together or not at all
    if rank == 0:
        attempt.begin(folder, attempt.own_number() or 1)
        failure.remove_older_failure(folder)
    kills = kills_by_kernel()
    child = _start_rank(folder, rank_main, cluster, rank)
    sends = rank == 0 and sends_live(config.tracking)
    beside = sender(folder) if sends else nullcontext()
    with beside, _heartbeat(folder, cluster, child, world_size) as heartbeat:
        lost = heartbeat.wait(until=lambda: _exit_superseded(folder))
        if heartbeat.hangs:
            if heartbeat.guilty:
                failure.write_hung(folder, *heartbeat.guilty)
            dump_stacks([child], heartbeat.sights)
        elif lost:
            # A task that is cut off misses rank 0's, which lives and hears the others: its word counts.
            replaces = not stop.asked and (
                rank == 0 or not failure.failed_by_exception(folder, "TaskLost")
            )
            failure.write(folder, "TaskLost", lost, replaces=replaces)
        if lost:
            os.kill(child.pid, signal.SIGKILL)
        status = child.reap()
        if status == -signal.SIGTERM:
            _wait_for_signal(stop)
        if heartbeat.guilty:
            heartbeat.wait_for_goodbyes(cluster.heartbeat_s)
        if status not in (0, SAVED) and not lost and not stop.asked:
            failure.write_died(
                folder, rank, status, peak_bytes=child.peak_bytes, kills_before=kills
            )
    if status == SAVED:
        status = _leave_to_slurm(folder, cluster, rank, stop)
    elif status != 0 and stop.asked:
        _record_why_slurm_ended(folder, rank)
    raise SystemExit(status if status >= 0 else SIGNALLED - status)


def _start_rank(folder: Path, rank_main: str, cluster: ClusterConfig, rank: int) -> WatchedRank:
    """Start the rank in its own interpreter, because this one imports nothing of it."""
    command = [sys.executable, "-u", "-m", "zeroexp.cluster.rank_entry"]
    command += [rank_main, str(folder), cluster.device]
    log = failure.log_path(folder, rank)
    log.parent.mkdir(exist_ok=True)
    # These signals stay blocked until a rank that can stop early handles them.
    waiting = ASKS_TO_STOP if cluster.max_requeues else ()
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


def _heartbeat(
    folder: Path, cluster: ClusterConfig, child: WatchedRank, world_size: int
) -> Heartbeat:
    file = folder / "slurm" / f"heartbeat.{attempt.own_number() or 1}"
    secret = bytes.fromhex(os.environ[ports.SECRET])
    return Heartbeat(
        child,
        world_size,
        HeartbeatAddress(os.environ[HEARTBEAT_AT], file, secret, os.environ.get(ports.RANGE)),
        cluster.heartbeat_s,
        hang_seconds=cluster.hang_s,
        name_of=partial(_name_of, world_size=world_size),
        start_seconds=cluster.start_s * (1 + world_size / RANKS_THAT_START_TOGETHER),
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


def _leave_to_slurm(folder: Path, cluster: ClusterConfig, rank: int, stop: Stop) -> int:
    """Return the exit code at the time limit; else stay until killed, see [Note: being asked to stop]."""
    if stop.asked:
        _record_why_slurm_ended(folder, rank)
        while True:
            time.sleep(1)
    if rank == 0:
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if restarts >= cluster.max_requeues:
            refusal = f"it was {restarts} times (cluster.slurm.max_requeues={cluster.max_requeues})"
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


def _wait_for_signal(stop: Stop) -> None:
    """Wait for Slurm's signal, which may reach the child, and kill it, before it reaches this process."""
    until = time.monotonic() + SECONDS_BETWEEN_SIGNALS
    while not stop.asked and time.monotonic() < until:
        time.sleep(0.01)


def main() -> NoReturn:
    """Run a task: `python -m zeroexp.cluster.task <module:function of a rank> <folder>`."""
    rank_main, folder = sys.argv[1:]
    run_task(Path(folder), rank_main)


if __name__ == "__main__":
    main()
