"""Ranks that start for real until one hangs, or is slow: test_hang.py."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroexp.interface.values import Read
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


def load_slowly(folder: Path, *, device: str) -> None:
    """Rank 1 reads its data and its weights for longer than ranks wait for a peer that nobody watches."""
    ranks.PEER_SECONDS = 1.0
    build_data, build_model = ranks.build_data, ranks.build_deferred

    class Slow:
        def __init__(self, values: Any) -> None:
            self.values, self.fingerprint = values, values.fingerprint

        def __iter__(self) -> Iterator[tuple[str, Read]]:
            time.sleep(3)
            return iter(self.values)

    def data(*words: Any) -> Any:
        time.sleep(3)
        return build_data(*words)

    def model(*words: Any, **more: Any) -> Any:
        built = build_model(*words, **more)
        return replace(built, values=Slow(built.values))

    if os.environ["RANK"] == "1":
        ranks.build_data, ranks.build_deferred = data, model
    ranks.main(folder, device=device)


def sync_slowly(folder: Path, *, device: str) -> None:
    """Rank 0 waits for its disk for longer than ranks wait for a peer that nobody watches."""
    ranks.PEER_SECONDS, sync = 1.0, ranks.RecordWriter.sync

    def wait(writer: ranks.RecordWriter) -> None:
        time.sleep(3)
        sync(writer)

    ranks.RecordWriter.sync = wait
    ranks.main(folder, device=device)
