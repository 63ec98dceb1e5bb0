"""A file that another process appends to, line by line."""

from __future__ import annotations

import os
from pathlib import Path


class Tail:
    """The lines of a file that need not exist yet; with `skip` only those appended from now on.

    A run that is resumed puts another file in its place, which is told from its beginning.
    """

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        self._path = path
        self._position, self._file = 0, None
        if skip and path.exists():
            seen = path.stat()
            self._position, self._file = seen.st_size, seen.st_ino

    def new_lines(self) -> list[str]:
        """Complete lines only: a line still being written is left for the next call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno()).st_ino
            if self._file not in (None, found):
                self._position = 0
            self._file = found
            file.seek(self._position)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._position += len(complete) + len(newline)
        return complete.decode().splitlines()
