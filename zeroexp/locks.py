"""Locks among the processes that share a file system. Each belongs to an open file and ends with its process.

So whoever finds a lock free knows that its last holder is dead. A pid could not tell: processes of another user
(/proc with hidepid), of another container or of another host are invisible.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
from pathlib import Path

UNKNOWN_TO_THE_FILE_SYSTEM = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class NoLocks(OSError):
    """The file system has no locks: Lustre that is mounted without `flock`, some of FUSE."""


def take(path: Path, *, wait: bool = False) -> io.FileIO | None:
    """Return the open file that holds the lock until it is closed; None if another process holds it.

    Raises NoLocks, and PermissionError for a file of somebody else.
    """
    file = _open(path)
    while True:
        try:
            _flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return file
        except BlockingIOError:
            if is_held(path):  # or another process just looked
                file.close()
                return None
        except BaseException:
            file.close()
            raise


def is_held(path: Path) -> bool:
    """Tell whether a living process holds the lock. Raises NoLocks, and PermissionError if the file is unreadable."""
    try:
        with io.FileIO(path) as file:
            _flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _open(path: Path) -> io.FileIO:
    try:
        return io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")  # NFS asks for writing
    except PermissionError as denied:
        try:
            return io.FileIO(path)  # somebody else's, which may still be locked
        except FileNotFoundError:
            raise denied from None


def _flock(file: io.FileIO, operation: int) -> None:
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in UNKNOWN_TO_THE_FILE_SYSTEM:
            raise
        raise NoLocks(error.errno, "this file system has no locks (flock)") from error
