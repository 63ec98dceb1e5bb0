"""Test by writing that a folder takes results: only that reveals quotas, full disks and read-only mounts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from zeroexp.config.keys import ConfigError

ENOUGH_BYTES = 32 << 10  # what the command itself writes of the shortest run


def require_writable(named: str, folder: str | Path, remedy: str) -> None:
    """Make the folder and write a temporary file into it. Raises ConfigError.

    named: the setting as the user gave it, `outputs=/scratch/me`.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(ENOUGH_BYTES))
    except OSError as error:
        where = "" if error.filename is None else f": {error.filename}"
        why = f"{error.strerror}{where}"
        if Path(folder).is_symlink() and not Path(folder).exists():
            why = f"a link to {Path(folder).readlink()}, which is not there"
        problem = f"no folder that can be written ({why})"
        raise ConfigError(f"{named}: {problem}; {remedy}") from error
