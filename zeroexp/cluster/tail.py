"""A file that another process appends to, line by line."""

from __future__ import annotations

import json
import os
from pathlib import Path

from zeroexp.checkpoint.folders import LOG

MARK_BYTES = 256  # of what was told last, by which the place in the file is known again


class Tail:
    """The lines of a file that need not exist yet; with `skip` only those appended from now on.

    A run that goes on from a checkpoint puts a shorter file in its place. Where what was told last is not in front of
    the place any more, all is told again. (The file's inode would not tell: a freed number is given to the next file.)
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
        """Complete lines only: a line still being written is left for the next call."""
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


class Complaints:
    """What is wrong with a run's checkpoints, from now on: a save that failed, a damaged one that was passed over."""

    def __init__(self, run: Path) -> None:
        self._log = Tail(run / LOG, skip=True)

    def new(self) -> list[str]:
        return [error for line in self._log.new_lines() if (error := json.loads(line)["error"])]
