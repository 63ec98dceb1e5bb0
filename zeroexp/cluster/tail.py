"""A file that another process appends to, line by line."""

from __future__ import annotations

from pathlib import Path


class Tail:
    """The lines of a file that need not exist yet; with `skip` only those appended from now on."""

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if skip and path.exists() else 0

    def new_lines(self) -> list[str]:
        """Complete lines only: a line still being written is left for the next call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._position += len(complete) + len(newline)
        return complete.decode().splitlines()
