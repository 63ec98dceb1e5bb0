"""Small JSON files that are whole at any moment, and a reserve of space so that a full disk can still be told.

JSON has no word for numbers that are none: they are written as strings, "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESERVE, RESERVE_BYTES = ".reserve", 1 << 16
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def dumps(content: Any, *, indent: int | None = None) -> str:
    """JSON that every reader of JSON takes."""
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_as_words(content), indent=indent)


def loads(text: str) -> Any:
    """What `dumps` was given."""
    content = json.loads(text)
    return _as_numbers(content) if any(f'"{word}"' in text for word in NOT_FINITE) else content


def _as_words(content: Any) -> Any:
    if isinstance(content, float) and not math.isfinite(content):
        return "NaN" if math.isnan(content) else "Infinity" if content > 0 else "-Infinity"
    return _mapped(_as_words, content)


def _as_numbers(content: Any) -> Any:
    if isinstance(content, str) and content in NOT_FINITE:
        return float(content)
    return _mapped(_as_numbers, content)


def _mapped(change: Callable[[Any], Any], content: Any) -> Any:
    if isinstance(content, dict):
        return {key: change(value) for key, value in content.items()}
    return [change(value) for value in content] if isinstance(content, list) else content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A reader sees the old content or the new one, never half of it, even after a power cut."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with_room(path.parent, lambda: write_through(beside, dumps(content, indent=2) + "\n"))
    beside.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no such file."""
    try:
        return loads(path.read_text())
    except FileNotFoundError:
        return None


def write_through(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def reserve(folder: Path) -> None:
    """Keep room for the last words of a run: the reason why it ended must fit where its records no longer did."""
    with (folder / RESERVE).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)


def with_room(folder: Path, write: Callable[[], None]) -> None:
    """Write; if the disk is full, give up the folder's reserve and write again."""
    try:
        write()
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        with contextlib.suppress(FileNotFoundError):
            (folder / RESERVE).unlink()
        write()
