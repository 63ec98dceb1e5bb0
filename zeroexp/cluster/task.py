"""One task of a Slurm job: it starts the rank as its child, and records the rank's death if the rank could not.

Slurm reports that a task was killed, but not why, nor which rank was the first cause, and only in srun's output. The
parent sees its child's exit status at once and on the same node. So a rank killed by the system is named with rank and
host, and overwrites what its peers report when they lose it. The parent imports next to nothing, because it lives
beside every rank.

[Note: being asked to stop] Slurm signals parent and child alike: SIGUSR2 some time before the time limit, SIGTERM when
it ends the job (preemption, scancel, the limit itself). If the run can be requeued, the ranks agree on a step, save,
and exit with SAVED; their tasks stay until they are killed. After SIGUSR2 rank 0's task asks Slurm to requeue the job.
After SIGTERM nobody asks: Slurm itself requeues a preempted job, unless the job ends before it is killed, which counts
as a failure; and a cancelled job that requeues itself could never be cancelled.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from zeroexp import advance
from zeroexp.cluster.hang import Watched
from zeroexp.cluster.heartbeat import Heartbeat
from zeroexp.cluster.leaving import run_and_leave
from zeroexp.cluster.live import sender
from zeroexp.cluster.lookout import Lookout
from zeroexp.stop import ASKS_TO_STOP, SAVED
from zeroexp.tracking import attempt, failure
from zeroexp.tracking.out_of_memory import kills_by_kernel

HEARTBEAT_AT = "ZEROEXP_HEARTBEAT"  # host:port of the task of rank 0
HOSTS = "ZEROEXP_HOSTS"  # the job's hosts in Slurm's order
SECONDS_BETWEEN_SIGNALS = 1.0  # from Slurm's signal to a task's child until its signal to the task
SECONDS_TO_NOTE = 2.0  # for one query to Slurm and one small file
SIGNALLED = 128  # a shell's exit code for a signal is this plus the signal
TIME_LIMIT = "time limit of this attempt (cluster.timeout_s)"
PREEMPTED = "preempted by a job of higher priority"
ENDED = "ended by Slurm (SIGTERM)"  # by scancel, or for a reason that Slurm does not report


@dataclass(frozen=True)
class Duty:
    """What a task must do, as told by the submitter."""

    folder: Path
    rank_main: str  # module:function, called with (folder, device=...)
    device: str
    heartbeat_s: float
    hang_s: float | None = None  # None: a rank that hangs is not looked for
    max_requeues: int = 0  # 0: the run cannot be requeued
    sends: bool = False  # True: rank 0's task sends the steps to MLflow


def run_task(duty: Duty) -> NoReturn:
    """Run one rank to its end, or until another task is lost. Raises SystemExit with the rank's exit code."""
    # These are Slurm's variables; world.py, which knows them too, would import torch.
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    folder, asked = duty.folder, _Asked()
    if rank == 0:
        attempt.begin(folder, attempt.mine() or 1)
        failure.forget(folder)
    kills = kills_by_kernel()
    child, numbers = _start(duty, rank)
    watched = Watched(
        rank, socket.gethostname(), child.pid, numbers, failure.log_path(folder, rank)
    )
    lookout = Lookout(watched, folder, rank, world_size, duty.hang_s, duty.heartbeat_s)
    beside = sender(folder) if duty.sends and rank == 0 else nullcontext()
    with beside, _heartbeat(duty, rank, world_size, lookout) as heartbeat:
        lost = heartbeat.wait(
            child.pid, until=lambda: _superseded(folder) or lookout.verdict(heartbeat.reports)
        )
        if lookout.hung:
            lookout.leave_stack(heartbeat)
            child.kill()
        elif lost:
            failure.write_unranked(folder, "TaskLost", lost, over=not asked.to_end)
            child.kill()
        _, status, used = os.wait4(child.pid, 0)
        status = os.waitstatus_to_exitcode(status)
        if status == -signal.SIGTERM:
            asked.wait()
        if rank == 0 and lookout.hung:
            heartbeat.wait_for_goodbyes(duty.heartbeat_s)
        if status not in (0, SAVED) and not lost and not asked.to_end:
            failure.write_died(
                folder,
                rank,
                status,
                peak_bytes=used.ru_maxrss * 1024,
                out_of_memory=kills_by_kernel() > kills,
            )
    if status == SAVED:
        _leave_to_slurm(duty, rank, asked)
    elif status != 0 and asked.to_end:
        _note_end(folder, rank)
    raise SystemExit(status if status >= 0 else SIGNALLED - status)


def _start(duty: Duty, rank: int) -> tuple[subprocess.Popen[bytes], memoryview]:
    """Start the rank in its own interpreter, because this one has submitit's signal handlers.

    Returns it and the memory in which it says how far it is.
    """
    command = [sys.executable, "-u", "-m", "zeroexp.cluster.task"]
    command += [duty.rank_main, str(duty.folder), duty.device]
    log = failure.log_path(duty.folder, rank)
    log.parent.mkdir(exist_ok=True)
    # These signals stay blocked until a rank that can stop early handles them.
    waiting = ASKS_TO_STOP if duty.max_requeues else ()
    signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    descriptor, numbers = advance.create()
    with log.open("ab") as output:  # also catches errors before the rank opens its log itself
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            pass_fds=[descriptor],
            env={**os.environ, advance.DESCRIPTOR: str(descriptor)},
        )
    os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waiting)
    return child, numbers


def _heartbeat(duty: Duty, rank: int, world_size: int, lookout: Lookout) -> Heartbeat:
    def name_of(other: int) -> str:
        return _name_of(other, world_size)

    address = os.environ[HEARTBEAT_AT]
    return Heartbeat(
        rank, world_size, address, duty.heartbeat_s, name_of=name_of, report=lookout.report
    )


def _name_of(rank: int, world_size: int) -> str:
    """Return `rank 3 on node17` if srun fills one node after the other, which is its default; else only the rank."""
    hosts = os.environ.get(HOSTS, "").split()
    in_blocks = os.environ.get("SLURM_DISTRIBUTION", "block").startswith("block")
    if hosts and (in_blocks or len(hosts) == world_size):
        return f"rank {rank} on {hosts[rank * len(hosts) // world_size]}"
    return f"rank {rank}"


def _superseded(folder: Path) -> str | None:
    """Return a message once a later attempt has begun, which makes this task and its rank leftovers."""
    try:
        attempt.check(folder)
    except attempt.Superseded as outdated:
        return str(outdated)
    return None


def _leave_to_slurm(duty: Duty, rank: int, asked: _Asked) -> None:
    """Stay until killed, see [Note: being asked to stop]; return if the job will not be requeued."""
    if rank == 0:
        state, preempted = _in_slurm()
        at_limit = state == "RUNNING" and not preempted and not asked.to_end
        attempt.end(duty.folder, TIME_LIMIT if at_limit else PREEMPTED if preempted else ENDED)
        if at_limit and (refusal := _requeue(duty.max_requeues)):
            attempt.end(duty.folder, f"{TIME_LIMIT}; not requeued: {refusal}")
            return
    while True:
        time.sleep(1)


def _note_end(folder: Path, rank: int) -> None:
    """Record why Slurm ended the attempt, because Slurm forgets a preemption and its accounting never knows of it."""
    if rank == 0:
        with suppress(attempt.Superseded):
            attempt.end(folder, PREEMPTED if _in_slurm()[1] else ENDED)
    else:
        time.sleep(SECONDS_TO_NOTE)  # srun kills rank 0's task as soon as another has failed


def _in_slurm() -> tuple[str, bool]:
    """Return the state of this job, and whether it is being preempted."""
    this = f"--jobs={os.environ['SLURM_JOB_ID']}"
    told, _ = _ask("squeue", "--noheader", this, "--Format=State:|,PreemptTime:|")
    state, _, preempted = told.strip().rstrip("|").partition("|")
    return state, preempted not in ("", "N/A")


def _requeue(most: int) -> str | None:
    """Ask Slurm to requeue this job; return the reason if it will not."""
    job_id, restarts = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if restarts >= most:
        return f"it was {restarts} times (cluster.slurm.max_requeues={most})"
    return _ask("scontrol", "requeue", job_id)[1]


def _ask(*command: str) -> tuple[str, str | None]:
    """Run a command of Slurm; return its output, and its complaint if it fails. A container may lack the command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return "", f"there is no {command[0]} here"
    return done.stdout, done.stderr.strip() or "refused" if done.returncode else None


class _Asked:
    """Has Slurm asked the job to end? It signals parent and child alike, so their ends are no rank's failure."""

    def __init__(self) -> None:
        self.to_end = False
        signal.signal(signal.SIGTERM, self._note)
        # The ranks answer SIGUSR2, all together or not at all.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def wait(self) -> None:
        """Wait for Slurm's signal, which may reach the child, and kill it, before it reaches this process."""
        until = time.monotonic() + SECONDS_BETWEEN_SIGNALS
        while not self.to_end and time.monotonic() < until:
            time.sleep(0.01)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.to_end = True


def main() -> NoReturn:
    """Run the child: `python -m zeroexp.cluster.task <module:function> <folder> <device>`."""
    rank_main, folder, device = sys.argv[1:]
    module, _, function = rank_main.partition(":")
    run_and_leave(
        lambda: getattr(importlib.import_module(module), function)(Path(folder), device=device)
    )


if __name__ == "__main__":
    main()
