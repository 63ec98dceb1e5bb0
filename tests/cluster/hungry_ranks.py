"""Ranks that run out of memory for real, in test_out_of_memory.py: a run's folder is named after a function here."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from zeroexp.measure.memory import most_held_bytes
from zeroexp.process import world
from zeroexp.run import rank as ranks
from zeroexp.tracking import failure

FAR_TOO_MUCH = 64 << 30


def prepare(folder: Path) -> None:
    """Everything is imported above."""


def main(folder: Path, *, device: str) -> None:
    globals()[folder.name](folder, device)


def ask_python(folder: Path, device: str) -> None:
    on_rank_1(folder, lambda: bytearray(FAR_TOO_MUCH))


def ask_torch(folder: Path, device: str) -> None:
    on_rank_1(folder, lambda: torch.empty(FAR_TOO_MUCH, dtype=torch.uint8))


def fill_page_after_page(folder: Path, device: str) -> None:
    """Nothing is refused; at some page the kernel ends the process."""
    on_rank_1(folder, lambda: [bytearray(os.urandom(1 << 20)) for _ in range(1 << 12)])


def train(folder: Path, device: str) -> None:
    """A whole run, whose model does not fit what rank 1 may still have."""
    if world.rank_info_from_environment(os.environ).rank == 1:
        held = re.findall(
            r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8")
        )
        most = (int(held[0]) << 10) + (64 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    ranks.main(folder, device=device)


def on_rank_1(folder: Path, action: Callable[[], object]) -> None:
    """Where the kernel promises memory that it does not have, a limit makes it refuse."""
    rank = world.rank_info_from_environment(os.environ).rank
    if rank != 1:
        time.sleep(1000)
    resource.setrlimit(resource.RLIMIT_AS, (FAR_TOO_MUCH // 2, FAR_TOO_MUCH // 2))
    try:
        action()
    except Exception as error:
        failure.write_raised(folder, rank, error, peak_bytes=most_held_bytes())
        raise SystemExit(1) from error
