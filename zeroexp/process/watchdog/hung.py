"""Ranks that hang: none of those that should advance has advanced for `cluster.hang_s`.

    rank ── numbers in shared memory (progress.py) ──▶ the process that started it ── Sight ──▶ who sees all ranks

Its peers wait for the rank that is behind: the one that did the least, unless one is stopped. Before the first step a
rank should only do anything at all: imports, weights and data may take any time, as long as they work. Ranks that have
met wait for those that still load. Before the job ends, every rank leaves the stacks of its threads in its log.

On one machine one process starts all ranks. Under Slurm a task starts one, its beats (lost.py) carry the Sight of it to
the task of rank 0, and the verdict back.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zeroexp.process import progress

STACK_SECONDS = 5.0  # from the request for a stack to its end
STILL_SECONDS = 0.2  # a log that has not grown for so long holds the whole stack
STOPPED, TRACED = "T", "t"  # of man proc: by a signal, by a debugger
LOOK_SECONDS = 5.0  # the longest time between two looks at the ranks of this machine
HUNG = "the ranks hang"  # the verdict in a beat

# Threads that only wait for a message wake now and then. A process that works uses far more than this share of a CPU.
SHARE_OF_WAITING = 0.01
# Fields of `man proc`, "stat", that follow the process name.
STATE, MAJOR_FAULTS, USER_TICKS, SYSTEM_TICKS = 0, 9, 11, 12
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Idle:
    """Tells for how long a process did nothing: no CPU time, no bytes read or written, no page fetched."""

    def __init__(self, pid: int) -> None:
        self._pid, self._ticks, self._moved = pid, 0, ""
        self._seconds = self._since_tick = 0.0

    def look(self, seconds: float) -> float:
        """Return the seconds for which it did nothing; `seconds` have passed since the last look."""
        stat = _stat(self._pid)
        ticks = int(stat[USER_TICKS]) + int(stat[SYSTEM_TICKS])
        moved = stat[MAJOR_FAULTS] + _read(f"/proc/{self._pid}/io")  # some sites show it to nobody
        self._since_tick += seconds
        computed = ticks - self._ticks > SHARE_OF_WAITING * self._since_tick * TICKS_PER_SECOND
        if stat[STATE] == "R" or computed or moved != self._moved:
            self._seconds = self._since_tick = 0.0
            self._ticks, self._moved = ticks, moved
        else:
            self._seconds += seconds
        return self._seconds


@dataclass(frozen=True)
class Sight:
    """One rank at one moment, as the process that started it sees it."""

    rank: int
    host: str
    pid: int
    done: tuple[int, int, int]  # steps, phases of this step, moves of this phase
    phase: str
    seconds: float  # since it last advanced; before the first step also: since it last worked
    state: str  # one letter, man proc: R, S, D, T, t, Z
    kernel: str  # the kernel's function in which it sleeps

    @property
    def must_advance(self) -> bool:
        if self.state in (STOPPED, TRACED):
            return self.state == STOPPED
        idle = self.phase in progress.STARTS and self.seconds > 0
        return self.phase in progress.MUST_ADVANCE or idle

    @property
    def loads(self) -> bool:
        """Whether the rank works before its first step, so that its peers may have to wait for long."""
        return self.phase in progress.STARTS and not self.must_advance

    def line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> Sight:
        values = json.loads(line)
        return cls(**{**values, "done": tuple(values["done"])})

    def __str__(self) -> str:
        starts = self.phase in progress.STARTS
        where = self.phase if starts else f"{self.phase} of step {self.done[0]}"
        how = {
            "T": f"its process {self.pid} was stopped from outside (SIGSTOP): find what stops processes there",
            "D": f"its process {self.pid} waits inside the kernel ({self.kernel}), as for a disk that does not answer",
            "R": f"its process {self.pid} computes",
        }.get(self.state, f"its process {self.pid} waits ({self.kernel})")
        return f"no progress for {self.seconds:.0f} s in {where}; {how}"


class WatchedRank:
    """One rank that this process started, from its start until it has ended."""

    def __init__(self, rank: int, pid: int, numbers: memoryview, log: Path) -> None:
        self.rank, self.pid, self._log = rank, pid, log
        self.status: int | None = None  # exit code, or minus the signal; None while it lives
        self.peak_bytes = 0  # peak resident memory, once it has ended
        self._pidfd, self._numbers, self._asked_at = os.pidfd_open(pid), numbers, 0
        self._idle, self._last_look = Idle(pid), time.monotonic()
        self._done, self._seconds = (0, 0, 0), 0.0

    def fileno(self) -> int:
        return self._pidfd

    def reap(self) -> int:
        """Return how the rank ended. Where it failed, what it started ends too, if it is the leader of its group."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_status != 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGTERM)  # nobody else gets its number before the wait
        _, status, used = os.wait4(self.pid, 0)
        self.peak_bytes = used.ru_maxrss * 1024
        self.status = os.waitstatus_to_exitcode(status)
        os.close(self._pidfd)
        return self.status

    def look(self, pause: float) -> Sight:
        """Return what the rank looks like; `pause` is the time between two looks.

        Where this process was stopped itself, as by a suspended job, the rank is not to blame: a pause counts at most
        twice.
        """
        now = time.monotonic()
        passed, self._last_look = min(now - self._last_look, 2 * pause), now
        numbers, state = self._numbers.tolist(), _stat(self.pid)[STATE]
        done = progress.done(numbers)
        self._seconds = self._seconds + passed if done == self._done else 0.0
        self._done = done
        phase = progress.PHASES[numbers[progress.PHASE]]
        kernel = _read(f"/proc/{self.pid}/wchan").strip("0") or "no wait"
        if phase in (progress.BEFORE, progress.BUILDING):
            self._seconds = min(self._seconds, self._idle.look(passed))
        host = socket.gethostname()
        sight = Sight(self.rank, host, self.pid, done, phase, self._seconds, state, kernel)
        if not sight.must_advance:
            self._seconds = 0.0
        return sight

    def ask_for_stack(self, sight: Sight) -> None:
        """Have the rank write its stacks into its log. One that is stopped goes on for it: end it afterwards."""
        self._write(f"{time.strftime('%H:%M:%S')} rank {self.rank}: {sight}")
        if not self._numbers[progress.LISTENS]:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, progress.LEAVES_STACK)
            if sight.state == STOPPED:
                os.kill(self.pid, signal.SIGCONT)

    def await_stack(self, deadline: float) -> None:
        """Return when the stack is in the log, or at this time of the monotonic clock."""
        seen, since = b"", time.monotonic()
        while b"most recent call first" not in seen or time.monotonic() - since < STILL_SECONDS:
            if time.monotonic() > deadline:
                self._write("it left no stack")
                return
            if (now := self._log.read_bytes()[self._asked_at :]) != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.02)

    def _write(self, line: str) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"--- {line}\n")
            self._asked_at = log.tell()


def dump_stacks(ranks: Sequence[WatchedRank], sights: Sequence[Sight]) -> None:
    """Have these ranks, last seen so, write the stacks of their threads into their logs within STACK_SECONDS."""
    for rank, sight in zip(ranks, sights, strict=True):
        rank.ask_for_stack(sight)
    deadline = time.monotonic() + STACK_SECONDS
    for rank in ranks:
        rank.await_stack(deadline)


def find_hang(sights: Sequence[Sight], hang_seconds: float) -> tuple[int, str, str] | None:
    """Return rank and host of the one that the others wait for, and a message; None if they do not hang."""
    behind = ranks_behind(sights, hang_seconds)
    if not behind:
        return None
    message = str(behind[0])
    if len(behind) > 1:
        who = ", ".join(str(sight.rank) for sight in behind)
        message = f"ranks {who} stand at the same place: {message}; see the stacks in all logs"
    return behind[0].rank, behind[0].host, f"{message} (cluster.hang_s)"


def ranks_behind(sights: Sequence[Sight], hang_seconds: float) -> list[Sight]:
    """Return the rank that the others wait for, once all that should advance stand still for so long; else nobody.

    While a debugger holds one of them, or the others wait for one that saves, they do not hang. Several ranks that did
    equally little are returned together.
    """
    should = [sight for sight in sights if sight.must_advance]
    held = any(sight.state == TRACED for sight in sights)
    if not should or held or any(sight.seconds < hang_seconds for sight in should):
        return []
    if stopped := [sight for sight in should if sight.state == STOPPED]:
        return stopped
    if all(sight.phase in progress.STARTS for sight in should) and any(s.loads for s in sights):
        return []
    least = min(sight.done for sight in sights)
    behind = [sight for sight in sights if sight.done == least]
    return [] if any(sight.phase == progress.SAVING for sight in behind) else behind


def _stat(pid: int) -> list[str]:
    """Return what the kernel tells of a process after its name; one that has ended did nothing."""
    text = _read(f"/proc/{pid}/stat").rpartition(")")[2]
    return text.split() or ["Z", *["0"] * SYSTEM_TICKS]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
