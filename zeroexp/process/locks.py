"""Locks among the processes that share a file system, and temporary folders. A lock belongs to an open file and ends
with its process.

So whoever finds a lock free knows that its last holder is dead. A pid could not tell: processes of another user
(/proc with hidepid), of another container or of another host are invisible.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX, LOCK = "zeroexp-", ".lock"  # of temporary folders
# EBADF: NFS locks no file that may only be read.
UNKNOWN_TO_THE_FILE_SYSTEM = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF)


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


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make a folder in TMPDIR, or a hidden one in `parent`, that is removed at the end.

    After `kill -9`, whoever makes the next one there on this host removes it; other hosts may not see its lock. That
    lies beside it: NFS and FUSE keep a file that is open, and so its folder, when it is removed.
    """
    prefix = f"{'.' if parent else ''}{PREFIX}{socket.gethostname()}-"
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent, prefix)
    with ExitStack() as at_end:
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
        folder, lock = Path(made.name), Path(f"{made.name}{LOCK}")
        at_end.callback(lambda: folder.exists() or lock.unlink(missing_ok=True))
        taken = Path(f"{lock}.taken")  # under its own name it is never seen without its holder
        try:
            if held := take(taken):
                at_end.enter_context(held)
                taken.rename(lock)
        except NoLocks:
            taken.unlink()
        at_end.enter_context(made)
        yield folder


def _remove_abandoned(parent: Path, prefix: str) -> None:
    with suppress(PermissionError):  # a folder may be writable and yet not be listed
        # Of this host alone: what tempfile draws has no "-", and other hosts' names may begin as this one's.
        named = [e for e in os.scandir(parent) if e.name.rpartition("-")[0] == prefix[:-1]]
        for entry in named:
            with suppress(OSError):  # somebody else's, or just removed by another process
                _remove_unless_held(Path(entry))


def _remove_unless_held(lock: Path) -> None:
    if lock.suffix == LOCK and (held := take(lock)):
        with held:
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            if not lock.with_suffix("").exists():
                lock.unlink()


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
