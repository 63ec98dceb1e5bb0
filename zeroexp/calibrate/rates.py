"""The rates of one rank while the others work as well, since they share caches and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from zeroexp.comm.base import ReducePart
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.shared_memory_sizes import slot_bytes
from zeroexp.comm.traits import MIB, MoveOptions
from zeroexp.cut.chunk import Chunk, ParameterSpec
from zeroexp.cut.layout import lay_out
from zeroexp.cut.stage import STAGES
from zeroexp.process import world as worlds
from zeroexp.process.world import World
from zeroexp.run.rank import keep_freed_memory

NUM_LAUNCHES, NUM_TRIALS = 2000, 5
NUM_REPEATS = 9  # of a reduction
PROBED_BYTES = (128 << 10, MIB, 16 * MIB)  # the last exceeds the caches of one core


@dataclass(frozen=True)
class Sizes:
    """What is multiplied and copied on one kind of device: so much that no cache of its own holds it."""

    rows: tuple[int, ...]
    width: int  # of the square matrices by which they are multiplied
    num_matrices: int
    num_bytes: int  # of a copy
    dtypes: tuple[torch.dtype, ...]
    transports: tuple[str, ...]


SIZES = {
    # 28 MB of matrices in float32.
    "cpu": Sizes(
        rows=(1, 16, 64, 128, 256, 1024),
        width=768,
        num_matrices=12,
        num_bytes=64 << 20,
        dtypes=(torch.float32, torch.bfloat16),
        transports=("direct", "gloo"),
    ),
    # 200 MB of matrices in bfloat16.
    "cuda": Sizes(
        rows=(16, 128, 512, 2048, 8192),
        width=4096,
        num_matrices=6,
        num_bytes=1 << 30,
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        transports=("native",),
    ),
}


def measure_rates(world: World) -> dict[str, Any]:
    """Return the fields of a Calibration that are rates. All ranks call it together."""
    keep_freed_memory()
    device = world.device
    sizes = SIZES[device.type]
    transports = sizes.transports if world.size > 1 else ()
    return {
        "products": {
            str(dtype).removeprefix("torch."): _measure_products(dtype, sizes, device)
            for dtype in sizes.dtypes
        },
        "bytes_per_second": _measure_memory(sizes.num_bytes, device),
        "launch_seconds": _measure_launch(device),
        "links": {transport: _measure_link(world, transport) for transport in transports},
    }


class ReductionCost(NamedTuple):
    """What a reduction of b bytes costs the slowest rank: its latency, and b over the bytes per second."""

    latency_seconds: float
    bytes_per_second: float  # of gradient on each rank, whatever part of it travels


def _measure_link(world: World, transport: str) -> list[float]:
    """Return latency and bytes per second; a reduction of b bytes sends the part of b that the peers own."""
    cost = fit_reduction_cost(PROBED_BYTES, measure_reductions(world, transport))
    return [cost.latency_seconds, cost.bytes_per_second * (world.size - 1) / world.size]


def fit_reduction_cost(num_bytes: Sequence[int], seconds: Sequence[float]) -> ReductionCost:
    """Fit a line through these points, weighted so that a relative error counts alike at every size."""
    slope, latency = np.polyfit(num_bytes, seconds, deg=1, w=[1 / s for s in seconds]).tolist()
    # At most 10 TB/s: so fast that noise hides it.
    return ReductionCost(max(latency, 0.0), 1 / max(slope, 1e-13))


def measure_reductions(world: World, transport: str) -> list[float]:
    """Return the seconds of reductions of PROBED_BYTES, each the median of the slowest rank's."""
    specs = [ParameterSpec("probe", num_bytes // 4, itemsize=4) for num_bytes in PROBED_BYTES]
    chunks = [lay_out("buffer", [[spec]], world.size)[0][0] for spec in specs]
    wire = Collectives(world, MoveOptions(transport=transport))
    wire.connect()
    wire.reserve([], slot_bytes([[c] for c in chunks], STAGES["zero2"], world.rank, 4))
    return [_seconds_of_reduction(chunk, wire) for chunk in chunks]


def _seconds_of_reduction(chunk: Chunk, wire: Collectives) -> float:
    device = wire.world.device
    gradient = torch.zeros(chunk.unpadded_numel, device=device)
    out = [torch.empty(span.numel, device=device) for span in chunk.spans(wire.world.rank)]

    def reduce() -> None:
        wire.reduce_scatter([ReducePart(chunk, [gradient], out)], "probe").wait()

    of_ranks = worlds.gather_objects(_trials(reduce, NUM_REPEATS, device))
    return median(max(seconds) for seconds in zip(*of_ranks, strict=True))


def _measure_products(dtype: torch.dtype, sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Return operations per second by rows. Values are random: of equal ones a GPU needs less power and is faster."""
    width = sizes.width
    matrices = [
        torch.randn(width, width, dtype=dtype, device=device) for _ in range(sizes.num_matrices)
    ]
    rates: dict[str, float] = {}
    for rows in sizes.rows:
        left = torch.randn(rows, width, dtype=dtype, device=device)

        def multiply(left: Tensor = left) -> None:
            for each in matrices:
                functional.linear(left, each)

        flops = 2 * rows * width**2 * sizes.num_matrices
        rates[str(rows)] = flops / _least_seconds(multiply, device)
    return rates


def _measure_memory(num_bytes: int, device: torch.device) -> float:
    """Return the bytes that an addition reads and writes in a second."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _least_seconds(lambda: torch.add(source, 1.0, out=target), device)


def _measure_launch(device: torch.device) -> float:
    """Return the seconds of an operation that computes next to nothing: on a GPU those of its host."""
    one = torch.ones(1, device=device)

    def launches() -> None:
        for _ in range(NUM_LAUNCHES):
            torch.add(one, one)

    return _least_seconds(launches, device) / NUM_LAUNCHES


def _least_seconds(do: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of a few trials of the slowest rank."""
    return max(worlds.gather_objects(min(_trials(do, NUM_TRIALS, device))))


def _trials(do: Callable[[], object], num_trials: int, device: torch.device) -> list[float]:
    """Return the seconds of each trial, which ranks begin together; one more runs cold and does not count."""
    seconds: list[float] = []
    for _ in range(1 + num_trials):
        worlds.barrier()
        began = time.perf_counter()
        do()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
