"""Which steps of a run are watched, and by what: memory by cause, a timeline, torch's profiler.

    the last warm-up step     memory by cause at the peak, which no time counts
    train.trace_steps         the same, and a timeline: trace.<rank>.<step>.json (timeline.py)
    train.profile_steps       torch.profiler: profile.<rank>.<step>.json and .txt (profiler.py)

On any other step nothing is installed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroexp.config import TrainConfig
from zeroexp.measure.profiler import profiled
from zeroexp.measure.record import Peak
from zeroexp.measure.timeline import events_of
from zeroexp.measure.trace import StepTrace, traced
from zeroexp.world import World


@dataclass
class Instruments:
    """The instruments of one run on this rank; `folder` is the run's."""

    settings: TrainConfig
    world: World
    folder: Path
    blocks: Mapping[str, nn.Module] = field(default_factory=dict[str, nn.Module])  # by name
    labels: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of every timeline

    @contextmanager
    def watching(
        self, step: int, model: nn.Module, *, reading: bool
    ) -> Generator[StepTrace | None]:
        """Watch this step inside; yields None where nobody asked for its trace.

        reading: the step's memory is read anyway. Where it is a warm-up step too, its peak is told by cause.
        """
        wanted = step in self.settings.trace_steps
        in_warmup = reading and step < self.settings.warmup_steps
        with ExitStack() as stack:
            if self._profiles(step):
                stack.enter_context(profiled(self.folder, self.world, step))
            if not (wanted or in_warmup):
                yield None
                return
            yield stack.enter_context(traced(model, self.blocks, self.world.device))

    def slows(self, step: int) -> bool:
        """Tell whether a rank watches this step at a cost, so that no time may count it."""
        return step in (*self.settings.trace_steps, *self.settings.profile_steps)

    def keep(self, step: int, trace: StepTrace | None, peak: Peak | None) -> None:
        """Write the timeline, where it was asked for."""
        if trace is None or step not in self.settings.trace_steps:
            return
        content = {
            "traceEvents": events_of(trace, self.world.rank),
            "displayTimeUnit": "ms",
            "otherData": {
                **{"rank": self.world.rank, "world_size": self.world.size, "step": step},
                "began_at": time.time() - (time.perf_counter() - trace.began),
                **self.labels,
                "peak": None if peak is None else asdict(peak),
            },
        }
        (self.folder / f"trace.{self.world.rank}.{step}.json").write_text(json.dumps(content))
        if self.world.device.type == "cuda":
            path = self.folder / f"memory.{self.world.rank}.{step}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))  # pyright: ignore[reportPrivateUsage]

    def _profiles(self, step: int) -> bool:
        ranks = self.settings.profile_ranks
        return step in self.settings.profile_steps and (not ranks or self.world.rank in ranks)
