"""Files and folders that survive a power cut: they are on the disk before they have their names."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeroexp.process.locks import temporary_folder


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that a power cut does not lose; until this returns, it may hold a part of the content."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes) -> None:
    """Write a file that appears whole: a reader sees the old content or the new one, even after a power cut."""
    beside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        write_durably(beside, content)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of files, to the disk: a power cut may undo creations and renames else."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield a folder to write into; it gets the name `target` once all of it is on disk, and is removed on an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(target.parent) as beside:
        folder = beside / target.name
        folder.mkdir()
        yield folder
        for path in (*folder.iterdir(), folder):
            sync(path)
        folder.rename(target)
        sync(target.parent)
