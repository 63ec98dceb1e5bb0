"""Standard output and error whose failures end no work, as on a full disk or into a closed pipe or terminal.

What is lost for another reason than that nobody reads it any more is told at the end.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

NOBODY_READS = (errno.EPIPE, errno.EBADF, errno.EIO)  # a closed pipe, descriptor or terminal


def ignore_output_errors() -> None:
    """Make standard output and error drop what can not be written; `has_lost_output` tells of it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # else the next file we open would receive what we print
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is sys.__stdout__:
        sys.stdout = sys.__stdout__ = _text(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = sys.__stderr__ = _text(sys.stderr, 2)


def has_lost_output() -> bool:
    """Whether some of standard output could not be written; a line on standard error says why."""
    sys.stdout.flush()
    if _lost:
        why = f"{_lost[0].strerror}; what was printed is lost"
        print(f"zeroexp: standard output: {why}", file=sys.stderr)
    return bool(_lost)


_lost: list[OSError] = []  # the first error of standard output


class _Lenient(io.FileIO):
    """A descriptor whose writes always succeed; one that does not block is waited for."""

    def write(self, content: Any, /) -> int:
        try:
            while (written := super().write(content)) is None:
                select.select([], [self], [])
            return written
        except OSError as error:
            if self.fileno() == 1 and error.errno not in NOBODY_READS and not _lost:
                _lost.append(error)
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
