"""attempts.json records each attempt at a run and why it ended. Only the newest attempt may write.

A node that lost only its slurmd keeps its ranks alive while Slurm starts the run again on other nodes. Such ranks
cannot be reached, so this module fences them off: it refuses whatever they are about to write in the run's folder, and
they end themselves.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from zeroexp.config.keys import DamagedFile
from zeroexp.tracking.json_files import read_json, write_json

ATTEMPTS = "attempts.json"
# The processes that start ranks and the ranks have this environment variable.
NUMBER = "ZEROEXP_ATTEMPT"
WITHOUT_A_WORD = "ended without a word: killed, or its node was lost"


class Superseded(Exception):
    """A newer attempt has begun in this folder: this process is a leftover, and its results are outdated."""


def own_number() -> int | None:
    """Return the attempt this process belongs to; None if the process was not started for a run."""
    number = os.environ.get(NUMBER)
    return None if number is None else int(number)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return each attempt's `number`, `began_at` (Unix seconds) and, if it ended early, its `ended_at` and `reason`."""
    try:
        content = read_json(folder / ATTEMPTS)
    except DamagedFile as error:  # as by a power cut, which no attempt survives
        print(error.line, file=sys.stderr)
        return []
    return content["attempts"] if content else []


def newest(folder: Path) -> int:
    """Return the number of the newest attempt; 0 if the run has never begun."""
    return max((attempt["number"] for attempt in read(folder)), default=0)


def begin(folder: Path, number: int) -> None:
    """Begin this process's attempt, which its children share. From now on, earlier attempts may write nothing.

    Raises Superseded if a later attempt has begun.
    """
    os.environ[NUMBER] = str(number)
    refuse_superseded(folder)
    earlier = [attempt for attempt in read(folder) if attempt["number"] < number]
    for attempt in earlier:
        attempt.setdefault("reason", WITHOUT_A_WORD)
    _write(folder, [*earlier, {"number": number, "began_at": time.time()}])


def end(folder: Path, reason: str) -> None:
    """Record that this process's attempt ended before the end of the run."""
    refuse_superseded(folder)
    attempts = read(folder)
    for attempt in attempts:
        if attempt["number"] == own_number():
            attempt.update(ended_at=time.time(), reason=reason)
    _write(folder, attempts)


def explain(folder: Path, reason: str) -> None:
    """Record why the newest attempt ended, as who watched it knows, unless it said so itself."""
    if attempts := read(folder):
        attempts[-1].setdefault("reason", reason)
        _write(folder, attempts)


def refuse_superseded(folder: Path) -> None:
    """Call this before writing into a run's folder. Raises Superseded."""
    number = own_number()
    if number is not None and newest(folder) > number:
        raise Superseded(f"attempt {newest(folder)} of {folder.name} has begun; this is {number}")


def _write(folder: Path, attempts: list[dict[str, Any]]) -> None:
    write_json(folder / ATTEMPTS, {"attempts": attempts})
