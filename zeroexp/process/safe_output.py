"""Standard output and error whose failures end no work, as on a full disk or into a closed pipe or terminal."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO


def keep_going() -> None:
    """Make standard output and error drop silently what can not be written, since nobody could be told."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # else the next file we open would receive what we print
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is sys.__stdout__:
        sys.stdout = sys.__stdout__ = _text(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = sys.__stderr__ = _text(sys.stderr, 2)


class _Lenient(io.FileIO):
    """A descriptor whose writes always succeed."""

    def write(self, content: Any, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(content)
        return len(content)


def _text(stream: TextIO | None, descriptor: int) -> io.TextIOWrapper:
    """Return a stream that writes in the encoding of `stream`, and escapes the characters that it lacks."""
    encoding = stream.encoding if stream else None  # PYTHONIOENCODING, or that of the locale
    raw = _Lenient(descriptor, "w", closefd=False)
    by_lines = descriptor == 2 or raw.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=by_lines,
    )
