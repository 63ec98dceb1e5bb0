"""failure.json says why a run failed; whoever knows the first cause writes it.

The first rank that raises writes it and wins, because its peers then only meet the consequences. A rank that was killed
writes nothing, so its launcher writes for it and overwrites what its peers reported when they lost it. A failure of an
attempt that is no longer the newest is dropped.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from zeroexp.process.durable import write_durably
from zeroexp.tracking import attempt
from zeroexp.tracking.disk_full import write_with_reserve
from zeroexp.tracking.json_files import read_json
from zeroexp.tracking.out_of_memory import Shortage, describe_shortage, gib, kills_by_kernel

FAILURE = "failure.json"
MOST_CHARACTERS = 300  # of a line of a log
REMEDIES = {
    errno.EAGAIN: "raise the limit of processes (ulimit -u), or use fewer ranks",
    errno.ENOMEM: "use a smaller model or fewer ranks",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or use fewer ranks",
    errno.ENFILE: "close files of other programs",
    errno.ENOSYS: "ranks need memfds and pidfds; use a newer kernel, or another sandbox",
}


def failed_by_exception(folder: Path, exception: str) -> bool:
    """Tell whether failure.json is about this kind of failure."""
    return (read_json(folder / FAILURE) or {}).get("exception") == exception


def log_path(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank{rank}.log"


def remove_older_failure(folder: Path) -> None:
    """Remove the failure that an attempt before this process's left in the same folder."""
    left = read_json(folder / FAILURE)
    if left and (left.get("attempt") or 0) < (attempt.own_number() or 0):
        (folder / FAILURE).unlink(missing_ok=True)


def write_raised(
    folder: Path, rank: int, error: BaseException, *, peak_bytes: int | None = None
) -> None:
    """Record this rank's exception; an earlier recorded failure stays. The rank itself calls this."""
    trace = "".join(traceback.format_exception(error))
    message = str(error)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        message = f"{message}; {REMEDIES[error.errno]}"
    short = describe_shortage(error, peak_bytes)
    message = str(short) if short else message
    write(folder, type(error).__name__, message, rank=rank, trace=trace, short=short)


def write_died(
    folder: Path,
    rank: int,
    status: int | None,
    *,
    peak_bytes: int | None = None,
    kills_before: int | None = None,
) -> None:
    """Record a rank's death; the launcher calls this.

    `status` is the exit code of the first rank that died, or minus the signal. peak_bytes: the rank's peak resident
    memory. kills_before: how many processes the kernel had killed for lack of memory when the rank began.
    """
    assert status, "a rank that has failed"
    if status > 0:
        message = f"rank {rank} ended with exit code {status} without saying why"
        if line := last_line(log_path(folder, rank)):
            message = f"rank {rank} ended with exit code {status}; its log ends with: {line}"
        write(folder, f"exit code {status}", message, rank=rank)
        return
    name = signal.Signals(-status).name
    killed = name == "SIGKILL"
    held = f"; resident at most {gib(peak_bytes)}" if peak_bytes and killed else ""
    message, short = f"rank {rank} was killed by {name}{held}", None
    if killed and kills_before is not None and kills_by_kernel() > kills_before:
        message = f"out of memory: the kernel killed rank {rank}{held}"
        short = Shortage(None, peak_bytes)
    # C++ aborts on an uncaught exception, even if a lost peer caused it, and a batch system that ends a job because of
    # one rank terminates the others.
    replaces = name not in ("SIGABRT", "SIGTERM")
    write(folder, name, message, rank=rank, short=short, replaces=replaces)


def write_hung(folder: Path, rank: int, host: str, message: str) -> None:
    """Record that a rank no longer advances, over what its peers met. The launcher calls this."""
    write(folder, "Hang", message, rank=rank, host=host, replaces=True)


def last_line(log: Path) -> str | None:
    """Return the last line of a log that says something, cut to a readable length."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return None
    return next((line.strip()[:MOST_CHARACTERS] for line in reversed(lines) if line.strip()), None)


def write(
    folder: Path,
    exception: str,
    message: str,
    *,
    rank: int | None = None,
    host: str | None = None,
    trace: str | None = None,
    short: Shortage | None = None,
    replaces: bool = False,
) -> None:
    """Write failure.json atomically; it `replaces` an existing one, or else the first one wins.

    rank: None where no rank caused it: none was started, or a launcher itself is lost. host: this one.
    """
    cause = {
        "rank": rank,
        "host": host or socket.gethostname(),
        "exception": exception,
        "message": message,
        "traceback": trace,
        "log": None if rank is None else str(log_path(folder, rank)),
        **({"out_of_memory": asdict(short)} if short else {}),
        "attempt": attempt.own_number(),
    }
    try:
        attempt.refuse_superseded(folder)
    except attempt.Superseded as outdated:
        print(f"{outdated}: nobody asks why it ended", file=sys.stderr)
        return
    # Rank 0's task removes it, if that has started.
    remove_older_failure(folder)
    text = json.dumps(cause, indent=2) + "\n"
    beside = folder / f".{FAILURE}.{socket.gethostname()}.{os.getpid()}"
    write_with_reserve(folder, lambda: write_durably(beside, text.encode()))
    if replaces:
        beside.replace(folder / FAILURE)
        return
    try:
        os.link(beside, folder / FAILURE)  # fails if it exists, also between machines
    except OSError:  # without hard links, the second of two writers at once may win
        if not (folder / FAILURE).exists():
            beside.replace(folder / FAILURE)
    beside.unlink(missing_ok=True)
