"""What a reduction costs on these links, by a line through a few that are timed; `zeroexp calibrate` keeps it.

seconds of a reduction of b bytes  =  latency + b / bandwidth
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zeroexp.comm.base import ReducePart
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.shared_memory_sizes import slot_bytes
from zeroexp.comm.traits import MIB
from zeroexp.cut.chunk import Chunk, ParameterSpec
from zeroexp.cut.layout import lay_out
from zeroexp.cut.stage import STAGES
from zeroexp.process import world as worlds
from zeroexp.process.world import World

PROBED_BYTES = (128 << 10, MIB, 16 * MIB)  # the last exceeds the caches of one core
NUM_REPEATS = 9


@dataclass(frozen=True)
class ReductionCost:
    """What a reduction costs the slowest rank of one world: a latency, and seconds for each byte."""

    latency_seconds: float
    bytes_per_second: float  # of gradient on each rank, whatever part of it travels


def fit_reduction_cost(num_bytes: Sequence[int], seconds: Sequence[float]) -> ReductionCost:
    """Fit a line through these points, weighted so that a relative error counts alike at every size."""
    slope, latency = np.polyfit(num_bytes, seconds, deg=1, w=[1 / s for s in seconds]).tolist()
    # At most 10 TB/s: so fast that noise hides it.
    return ReductionCost(max(latency, 0.0), 1 / max(slope, 1e-13))


def measure_reductions(world: World, *, transport: str = "auto") -> list[float]:
    """Return the seconds of reductions of PROBED_BYTES between all ranks of `world`, which call it together.

    This takes some tenths of a second.
    """
    chunks = [_probe_chunk(num_bytes // 4, world.size) for num_bytes in PROBED_BYTES]
    wire = Collectives(world, transport=transport)
    wire.connect()
    wire.reserve([], slot_bytes([[c] for c in chunks], STAGES["zero2"], world.rank, 4))
    return [_seconds_of(chunk, wire) for chunk in chunks]


def _probe_chunk(numel: int, world_size: int) -> Chunk:
    (chunk,) = lay_out("buffer", [[ParameterSpec("probe", numel, itemsize=4)]], world_size)[0]
    return chunk


def _seconds_of(chunk: Chunk, wire: Collectives) -> float:
    """Return the median over repeats of the slowest rank's time, without the first repeat, which runs cold."""
    device = wire.world.device
    gradient = torch.zeros(chunk.unpadded_numel, device=device)
    out = [torch.empty(span.numel, device=device) for span in chunk.spans(wire.world.rank)]
    seconds: list[float] = []
    for _ in range(1 + NUM_REPEATS):
        worlds.barrier()
        began = time.perf_counter()
        wire.reduce_scatter([ReducePart(chunk, [gradient], out)], "probe").wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    slowest = [max(ranks) for ranks in zip(*worlds.gather_objects(seconds[1:]), strict=True)]
    return statistics.median(slowest)
