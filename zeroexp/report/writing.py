"""Files that a report writes: one that can not be written costs one line, with the option that named it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeroexp.config.keys import ConfigError


@contextmanager
def writing(
    option: str, path: Path | str, remedy: str = "use a file in a folder that you may write to"
) -> Iterator[None]:
    """Write inside. Raises ConfigError if the file cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            remedy = "make room there, or use a file on another disk"
        raise ConfigError(f"--{option} {path}: {error.strerror}; {remedy}") from None
