"""Which steps of a run are watched, and by what: memory by cause, a timeline, torch's profiler.

    the last warm-up step     memory by cause at the peak, which no time counts; dtypes (dtypes_found.py)
    train.trace_steps         the same, and a timeline: trace.<rank>.<step>.json (trace_file.py)
    train.profile_steps       torch.profiler, engine's verbs as ranges: profile.<rank>.<step>.json and .txt

On any other step nothing is installed.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from zeroexp.config.keys import TrainConfig
from zeroexp.interface.strategy import Strategy
from zeroexp.measure.communication_overlap import meter
from zeroexp.measure.dtypes_found import DtypeRecorder
from zeroexp.measure.formats import FORMAT, KEY
from zeroexp.measure.record import Peak
from zeroexp.measure.trace import StepTrace, tracing_step
from zeroexp.measure.trace_file import events_of
from zeroexp.process.world import World

PREFIX = "zeroexp::"  # of ranges: "zeroexp::gather unit 0, wait"
NUM_ROWS = 200  # of the profiler's table


@dataclass
class Instruments:
    """The instruments of one run on this rank; `folder` is the run's."""

    settings: TrainConfig
    world: World
    folder: Path
    module: nn.Module | None = None  # the model as it was built, whose names count
    blocks: Mapping[str, nn.Module] = field(default_factory=dict[str, nn.Module])  # by name
    labels: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of every timeline
    dtypes: DtypeRecorder = field(default_factory=DtypeRecorder)  # of the step whose memory is read

    @contextmanager
    def watching(
        self, step: int, strategy: Strategy, *, reading: bool, by_cause: bool
    ) -> Generator[StepTrace | None]:
        """Watch this step inside; yields None where nobody asked for its trace.

        reading: its memory is read anyway. by_cause: its peak is told by cause.
        """
        is_traced = by_cause or step in self.settings.trace_steps
        with ExitStack() as stack:
            if self._profiles(step):
                stack.enter_context(profiling(self.folder, self.world, step))
            if reading and self.module is not None:
                # A hook on a part of a compiled block would have it compiled again.
                parts = () if self.settings.compile else self.module.modules()
                stack.enter_context(self.dtypes.watching(parts))
            trace = tracing_step(strategy.model, self.blocks, self.world.device)
            yield stack.enter_context(trace) if is_traced else None

    def slows(self, step: int) -> bool:
        """Tell whether a rank watches this step at a cost, so that no time may count it."""
        train = self.settings
        return step in (*train.trace_steps, *train.profile_steps)

    def write_timeline(self, step: int, trace: StepTrace | None, peak: Peak | None) -> None:
        if trace is None or step not in self.settings.trace_steps:
            return
        content = {
            "otherData": {
                KEY: FORMAT,
                **{"rank": self.world.rank, "world_size": self.world.size, "step": step},
                "began_at": time.time() - (time.perf_counter() - trace.began_at),
                **self.labels,
                "peak": None if peak is None else asdict(peak),
            },
            "displayTimeUnit": "ms",
            "traceEvents": events_of(trace, self.world.rank),
        }
        path = self.folder / f"trace.{self.world.rank}.{step}.json"
        with may_be_lost(path.name):
            path.write_text(json.dumps(content), encoding="utf-8")
            if trace.log is not None and trace.log.snapshot is not None:
                path = self.folder / f"memory.{self.world.rank}.{step}.pickle"
                path.write_bytes(pickle.dumps(trace.log.snapshot))

    def _profiles(self, step: int) -> bool:
        ranks = self.settings.profile_ranks
        return step in self.settings.profile_steps and (not ranks or self.world.rank in ranks)


@contextmanager
def profiling(folder: Path, world: World, step: int) -> Generator[None]:
    """Profile what happens inside, and write profile.<rank>.<step>.json (trace events) and .txt (a table)."""
    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # There is one cycle; torch 2.11 warns of more unless they accumulate.
    with profile(activities=activities, acc_events=True) as seen:
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
