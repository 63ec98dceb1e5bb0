"""What ranks do in test_slurm.py that need a world; the others are in light_ranks.py."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from zeroexp.process import world
from zeroexp.tracking.files import write_json


def meet(folder: Path, *, device: str) -> None:
    """All ranks join one world; rank 0 tells who came, and from which code."""
    with world.joined_process_group(device=device, timeout_seconds=60) as here:
        mine = {"rank": here.rank, "size": here.size, "host": socket.gethostname()}
        mine |= {"pid": os.getpid(), "code": world.__file__}
        ranks = world.gather_objects(mine)
        if here.rank == 0:
            write_json(folder / "summary.json", {"ranks": ranks})
