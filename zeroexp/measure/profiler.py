"""torch.profiler records one step, with the engine's verbs as named ranges ("zeroexp::gather unit 0, wait")."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zeroexp.measure.verb_seconds import meter
from zeroexp.process.world import World

PREFIX = "zeroexp::"
NUM_ROWS = 200  # of the summary table


@contextmanager
def profiling(folder: Path, world: World, step: int) -> Generator[None]:
    """Profile what happens inside, and write profile.<rank>.<step>.json (trace events) and .txt (a table)."""
    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as seen:
        meter.annotate = lambda name: record_function(PREFIX + name)
        try:
            yield
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
        finally:
            meter.annotate = None
    name = folder / f"profile.{world.rank}.{step}"
    with may_be_lost(name.name):
        seen.export_chrome_trace(f"{name}.json")
        on = "device" if world.device.type == "cuda" else "cpu"
        averages: Any = seen.key_averages()
        table: str = averages.table(
            sort_by=f"self_{on}_time_total", row_limit=NUM_ROWS, max_name_column_width=80
        )
        Path(f"{name}.txt").write_text(table + "\n", encoding="utf-8")


@contextmanager
def may_be_lost(name: str) -> Generator[None]:
    """Write an instrument's file inside; where it can not be written, as on a full disk, a line says so."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        print(f"{name} is not written: {error}")
