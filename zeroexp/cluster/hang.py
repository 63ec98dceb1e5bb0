"""Find a job whose ranks no longer advance, and the rank that holds up the others.

    rank ── numbers in shared memory (progress.py) ──▶ the process that started it ── Sight ──▶ who sees all ranks

A job hangs when no rank that should advance has advanced for `cluster.hang_s`. Its peers wait for the rank that is
behind: the one that did the least, unless one is stopped. Before the first step a rank should only do anything at all
(idle.py), and ranks that have met wait for those that still load. Before the job ends, every rank leaves the stacks of
its threads in its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zeroexp.cluster.idle import Idle
from zeroexp.process import progress
from zeroexp.tracking import failure

STACK_SECONDS = 5.0  # from the request for a stack to its end
STILL_SECONDS = 0.2  # a log that has not grown for so long holds the whole stack
STOPPED = ("T", "t")  # of man proc: by a signal, by a debugger
LOOK_SECONDS = 5.0  # the longest time between two looks at the ranks of this machine


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
        idle = self.phase in progress.STARTS and self.seconds > 0
        return self.phase in progress.MUST_ADVANCE or self.state in STOPPED or idle

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
            "T": f"its process {self.pid} is stopped: kill -CONT {self.pid} there lets it go on",
            "t": f"a debugger has stopped its process {self.pid}",
            "D": f"its process {self.pid} waits inside the kernel ({self.kernel}), as for a disk that does not answer",
            "R": f"its process {self.pid} computes",
        }.get(self.state, f"its process {self.pid} waits ({self.kernel})")
        return f"no progress for {self.seconds:.0f} s in {where}; {how}"


class Watched:
    """One rank that this process started."""

    def __init__(self, rank: int, host: str, pid: int, numbers: memoryview, log: Path) -> None:
        self._rank, self._host, self._pid, self._log = rank, host, pid, log
        self._numbers, self._asked_at, self._idle = numbers, 0, Idle(pid)
        self._done, self._seconds = (0, 0, 0), 0.0

    def look(self, seconds: float) -> Sight:
        """Return what the rank looks like; `seconds` have passed since the last look."""
        numbers, state = self._numbers.tolist(), _process_state(self._pid)
        done = (
            numbers[progress.NUM_STEPS],
            numbers[progress.NUM_PHASES],
            numbers[progress.NUM_MOVES],
        )
        self._seconds = self._seconds + seconds if done == self._done else 0.0
        self._done = done
        phase, kernel = progress.PHASES[numbers[progress.PHASE]], kernel_wait_of(self._pid)
        if phase in (progress.BEFORE, progress.BUILDING):
            self._seconds = min(self._seconds, self._idle.look(seconds))
        sight = Sight(self._rank, self._host, self._pid, done, phase, self._seconds, state, kernel)
        if not sight.must_advance:
            self._seconds = 0.0
        return sight

    def ask_for_stack(self, sight: Sight) -> None:
        """Have the rank write its stacks into its log. One that is stopped goes on for it: end it afterwards."""
        self._write(f"{time.strftime('%H:%M:%S')} rank {self._rank}: {sight}")
        if not self._numbers[progress.LISTENS]:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, progress.LEAVES_STACK)
            if sight.state in STOPPED:
                os.kill(self._pid, signal.SIGCONT)

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


def leave_stacks(watched: Sequence[Watched], sights: Sequence[Sight]) -> None:
    """Have these ranks leave their stacks, within STACK_SECONDS."""
    for each, sight in zip(watched, sights, strict=True):
        each.ask_for_stack(sight)
    deadline = time.monotonic() + STACK_SECONDS
    for each in watched:
        each.await_stack(deadline)


def ranks_behind(sights: Sequence[Sight], hang_seconds: float) -> list[Sight]:
    """Return the rank that the others wait for, once all that should advance stand still for so long; else nobody.

    Several ranks that did equally little are returned together.
    """
    should = [sight for sight in sights if sight.must_advance]
    if not should or any(sight.seconds < hang_seconds for sight in should):
        return []
    if stopped := [sight for sight in should if sight.state in STOPPED]:
        return stopped
    if all(sight.phase in progress.STARTS for sight in should) and any(s.loads for s in sights):
        return []
    least = min(sight.done for sight in sights)
    return [sight for sight in sights if sight.done == least]


def write_hang(folder: Path, guilty: Sequence[Sight]) -> None:
    """Write failure.json: the rank that is behind; all of them if none of them is behind the others."""
    first, *others = guilty
    message = str(first)
    if others:
        who = ", ".join(str(sight.rank) for sight in guilty)
        message = f"ranks {who} stand at the same place: {message}; see the stacks in all logs"
    failure.write_hung(folder, first.rank, first.host, f"{message} (cluster.hang_s)")


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def kernel_wait_of(pid: int) -> str:
    """Return the kernel's function in which this process sleeps."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8").strip("0") or "no wait"
    except OSError:
        return "unknown"
