"""This process as a user who is not root, and a folder of somebody else: what is told where a file says no."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def not_root() -> Iterator[None]:
    """Root, who may read everything, acts as nobody, who may be unable to enter the folder this repository lies in."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        os.setegid(65534)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        os.setegid(group)


@contextmanager
def open_to_all() -> Iterator[Path]:
    """A new folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """For those who may write there otherwise."""
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(0o755)
