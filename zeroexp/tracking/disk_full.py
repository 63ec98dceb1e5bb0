"""A reserve of space in a run's folder, so that the reason of a failure can be written where records fill the disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

RESERVE, RESERVE_BYTES = ".reserve", 1 << 16
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def reserve(folder: Path) -> None:
    """Reserve space in the folder."""
    with (folder / RESERVE).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)


def write_with_reserve(folder: Path, write: Callable[[], None]) -> None:
    """Call `write`; if the disk is full, free the folder's reserve and call it again."""
    try:
        write()
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        with contextlib.suppress(FileNotFoundError):
            (folder / RESERVE).unlink()
        write()
