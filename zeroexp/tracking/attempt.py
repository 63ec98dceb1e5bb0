"""attempts.json: how often a run was begun, and why each attempt ended. The newest attempt alone may write.

A node that lost only its slurmd keeps its ranks alive while Slurm starts the run again on others. Such ranks can not be
reached, so whatever they are about to write in the run's folder is refused here, and they end themselves.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from zeroexp.tracking.json_files import read_json, write_json

ATTEMPTS = "attempts.json"
NUMBER = "ZEROEXP_ATTEMPT"  # in the environment of whoever starts ranks, and of the ranks
WITHOUT_A_WORD = "ended without a word: killed, or its node was lost"


class Superseded(Exception):
    """A newer attempt has begun in this folder: this process is a leftover, and what it would say is outdated."""


def mine() -> int | None:
    """The attempt this process belongs to; None for a process that was not started for a run."""
    number = os.environ.get(NUMBER)
    return None if number is None else int(number)


def read(folder: Path) -> list[dict[str, Any]]:
    """`number`, `began_at` (Unix seconds) and, of one that has ended short of the run's end, `ended_at`, `reason`."""
    content = read_json(folder / ATTEMPTS)
    return content["attempts"] if content else []


def newest(folder: Path) -> int:
    """0 where the run was never begun."""
    return max((attempt["number"] for attempt in read(folder)), default=0)


def begin(folder: Path, number: int) -> None:
    """Of this process and those it starts. From now on, earlier attempts may write nothing.

    Raises Superseded if a later one has begun.
    """
    os.environ[NUMBER] = str(number)
    check(folder)
    earlier = [attempt for attempt in read(folder) if attempt["number"] < number]
    for attempt in earlier:
        attempt.setdefault("reason", WITHOUT_A_WORD)
    _write(folder, [*earlier, {"number": number, "began_at": time.time()}])


def end(folder: Path, reason: str) -> None:
    """Of this process's attempt, short of the end of the run."""
    check(folder)
    attempts = read(folder)
    for attempt in attempts:
        if attempt["number"] == mine():
            attempt.update(ended_at=time.time(), reason=reason)
    _write(folder, attempts)


def check(folder: Path) -> None:
    """Call it before writing into a run's folder. Raises Superseded."""
    number = mine()
    if number is not None and newest(folder) > number:
        raise Superseded(f"attempt {newest(folder)} of {folder.name} has begun; this is {number}")


def _write(folder: Path, attempts: list[dict[str, Any]]) -> None:
    write_json(folder / ATTEMPTS, {"attempts": attempts})
