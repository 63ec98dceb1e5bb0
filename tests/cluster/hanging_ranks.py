"""Ranks that start for real until rank 1 hangs: test_hang.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from zeroexp.run import rank as ranks
from zeroexp.run.rank import prepare as prepare


def sleep_while_building(folder: Path, *, device: str) -> None:
    """Rank 1 sleeps for ever while it builds its model, as before a disk or a lock of a library."""
    build = ranks.build_deferred

    def lock(*words: Any, **more: Any) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(1000)
        return build(*words, **more)

    ranks.build_deferred = lock
    ranks.main(folder, device=device)
