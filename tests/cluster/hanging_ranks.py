"""Ranks that train for real until rank 1 hangs: test_hang.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from zeroexp.run import rank as ranks
from zeroexp.run.rank import prepare as prepare
from zeroexp.training import loop


def sleep_in_forward(folder: Path, *, device: str) -> None:
    """Rank 1 sleeps for ever in the third forward pass, as in a lock that nobody gives back."""
    loss_sum, calls = loop._loss_sum, 0

    def lock(*words: Any) -> Any:
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == "1" and calls == 3:
            time.sleep(1000)
        return loss_sum(*words)

    loop._loss_sum = lock
    ranks.main(folder, device=device)


def sleep_while_building(folder: Path, *, device: str) -> None:
    """Rank 1 sleeps for ever while it builds its model, as before a disk or a lock of a library."""
    build = ranks.build_deferred

    def lock(*words: Any, **more: Any) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(1000)
        return build(*words, **more)

    ranks.build_deferred = lock
    ranks.main(folder, device=device)


def sleep_before_meeting(folder: Path, *, device: str) -> None:
    """Rank 1 never comes to where the ranks meet."""
    keep = ranks.keep_freed_memory

    def lock() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(1000)
        keep()

    ranks.keep_freed_memory = lock
    ranks.main(folder, device=device)
