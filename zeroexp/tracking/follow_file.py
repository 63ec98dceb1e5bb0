"""Follow a file that another process appends to, line by line."""

from __future__ import annotations

import os
from pathlib import Path

MARK_BYTES = 256  # bytes before the position, kept to recognize a replaced file


class Tail:
    """The lines of a file that need not exist yet; with `skip` only those appended from now on.

    A run that resumes from a checkpoint replaces the file by a shorter one. If the last bytes returned are no longer in
    front of the position, all lines are returned again. (The inode cannot show this: a freed number goes to the next
    file.)
    """

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        self._path = path
        self._position, self._told = 0, b""
        if skip and path.exists():
            with path.open("rb") as file:
                self._position = file.seek(0, os.SEEK_END)
                file.seek(max(0, self._position - MARK_BYTES))
                self._told = file.read(min(self._position, MARK_BYTES))

    def new_lines(self) -> list[str]:
        """Return the new complete lines; a line still being written is left for the next call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position - len(self._told))
            content = file.read()
            if not content.startswith(self._told):
                file.seek(0)
                content, self._position, self._told = file.read(), 0, b""
        complete, newline, _ = content[len(self._told) :].rpartition(b"\n")
        self._position += len(complete) + len(newline)
        self._told = (self._told + complete + newline)[-MARK_BYTES:]
        return complete.decode().splitlines()
