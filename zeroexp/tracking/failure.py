"""failure.json: why a run failed, from whoever knows the first cause.

The first rank that raises writes it and wins: what its peers meet afterwards are consequences. A rank that was killed
writes nothing, so its launcher writes for it, over what its peers said when they lost it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import traceback
from pathlib import Path
from typing import Any

FAILURE = "failure.json"


def log_path(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank{rank}.log"


def forget(folder: Path) -> None:
    """Of an earlier attempt in the same folder."""
    (folder / FAILURE).unlink(missing_ok=True)


def write_raised(folder: Path, rank: int, error: Exception) -> None:
    """Called by the rank itself; does nothing where an earlier failure is written down."""
    trace = "".join(traceback.format_exception(error))
    _write(folder, _cause(folder, rank, type(error).__name__, str(error), trace))


def write_died(folder: Path, rank: int, status: int) -> None:
    """Called by the launcher; `status` is the exit code of the first rank that died, or minus the signal."""
    if status > 0:
        message = f"rank {rank} ended with exit code {status} without saying why"
        _write(folder, _cause(folder, rank, f"exit code {status}", message))
        return
    name = signal.Signals(-status).name
    hint = " (out of memory, or killed by hand?)" if name == "SIGKILL" else ""
    cause = _cause(folder, rank, name, f"rank {rank} was killed by {name}{hint}")
    # C++ aborts on an exception nobody caught, also on one caused by a lost peer; a batch system that ends a job
    # because of one rank terminates the others.
    _write(folder, cause, over=name not in ("SIGABRT", "SIGTERM"))


def write_unranked(folder: Path, exception: str, message: str, *, over: bool = False) -> None:
    """Called by the launcher where no rank is to blame: none was started, or a launcher itself is lost.

    `over` what ranks say that met the consequences.
    """
    cause = {"rank": None, "host": socket.gethostname(), "exception": exception, "message": message}
    _write(folder, {**cause, "traceback": None, "log": None}, over=over)


def _cause(
    folder: Path, rank: int, exception: str, message: str, trace: str | None = None
) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "exception": exception,
        "message": message,
        "traceback": trace,
        "log": str(log_path(folder, rank)),
    }


def _write(folder: Path, cause: dict[str, Any], *, over: bool = False) -> None:
    """At once and whole, so that nobody reads half of it; `over` replaces what stands there, else the first wins."""
    beside = folder / f".{FAILURE}.{socket.gethostname()}.{os.getpid()}"
    beside.write_text(json.dumps(cause, indent=2) + "\n")
    if over:
        beside.replace(folder / FAILURE)
        return
    with contextlib.suppress(FileExistsError):
        os.link(beside, folder / FAILURE)  # fails where it exists, also between machines
    beside.unlink()
