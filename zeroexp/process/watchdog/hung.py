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
import time
from collections.abc import Callable, Sequence
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
            "T": f"its process {self.pid} is stopped: kill -CONT {self.pid} there lets it go on",
            "D": f"its process {self.pid} waits inside the kernel ({self.kernel}), as for a disk that does not answer",
            "R": f"its process {self.pid} computes",
        }.get(self.state, f"its process {self.pid} waits ({self.kernel})")
        return f"no progress for {self.seconds:.0f} s in {where}; {how}"


class WatchedRank:
    """One rank that this process started."""

    def __init__(self, rank: int, host: str, pid: int, numbers: memoryview, log: Path) -> None:
        self._rank, self._host, self._pid, self._log = rank, host, pid, log
        self._numbers, self._asked_at, self._idle = numbers, 0, Idle(pid)
        self._done, self._seconds = (0, 0, 0), 0.0

    def look(self, seconds: float) -> Sight:
        """Return what the rank looks like; `seconds` have passed since the last look."""
        numbers, state = self._numbers.tolist(), _stat(self._pid)[STATE]
        done = progress.done(numbers)
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
            if sight.state == STOPPED:
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


class HangWatch:
    """Looks at ranks that this process started, `pause` seconds apart, and tells whether the job hangs.

    Where it was stopped itself, as by a suspended job, the ranks are not to blame: a pause counts at most twice.
    blame: called with rank, host and message where this process finds it.
    """

    def __init__(
        self, hang_seconds: float | None, pause: float, blame: Callable[[int, str, str], None]
    ) -> None:
        self.hung = False
        self._pause, self._last_look = pause, time.monotonic()
        self._hang_seconds, self._blame = hang_seconds, blame
        self._seen: list[tuple[WatchedRank, Sight]] = []

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._last_look >= self._pause

    def look(self, ranks: Sequence[WatchedRank]) -> list[Sight]:
        now = time.monotonic()
        passed, self._last_look = min(now - self._last_look, 2 * self._pause), now
        self._seen = [(rank, rank.look(passed)) for rank in ranks]
        return [sight for _, sight in self._seen]

    def report(self, rank: WatchedRank) -> str:
        """Return what a beat says of this rank: its Sight, or the verdict."""
        if self.hung or self._hang_seconds is None:
            return HUNG if self.hung else ""
        return self.look([rank])[0].line()

    def judge(self, others: Sequence[str] = ()) -> bool:
        """Tell whether the ranks hang: those seen and the others of the job, whose reports these are."""
        if self._hang_seconds is not None and not self.hung:
            sights = [*(sight for _, sight in self._seen), *map(Sight.read, others)]
            if behind := ranks_behind(sights, self._hang_seconds):
                self.hung = True
                self._blame(behind[0].rank, behind[0].host, _describe(behind))
        return self.hung

    def leave_stacks(self) -> None:
        """Have the ranks seen leave their stacks, within STACK_SECONDS."""
        for rank, sight in self._seen:
            rank.ask_for_stack(sight)
        deadline = time.monotonic() + STACK_SECONDS
        for rank, _ in self._seen:
            rank.await_stack(deadline)


def ranks_behind(sights: Sequence[Sight], hang_seconds: float) -> list[Sight]:
    """Return the rank that the others wait for, once all that should advance stand still for so long; else nobody.

    While a debugger holds one of them, they do not hang. Several ranks that did equally little are returned together.
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
    return [sight for sight in sights if sight.done == least]


def kernel_wait_of(pid: int) -> str:
    """Return the kernel's function in which this process sleeps."""
    return _read(f"/proc/{pid}/wchan").strip("0") or "no wait"


def _describe(behind: Sequence[Sight]) -> str:
    message = str(behind[0])
    if len(behind) > 1:
        who = ", ".join(str(sight.rank) for sight in behind)
        message = f"ranks {who} stand at the same place: {message}; see the stacks in all logs"
    return f"{message} (cluster.hang_s)"


def _stat(pid: int) -> list[str]:
    """Return what the kernel tells of a process after its name; one that has ended did nothing."""
    text = _read(f"/proc/{pid}/stat").rpartition(")")[2]
    return text.split() or ["Z", *["0"] * SYSTEM_TICKS]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
