"""The rates of one rank while the others work as well, since they share caches and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zeroexp import world as worlds
from zeroexp.comm.tuning import measure_moves
from zeroexp.world import World

ROWS, WIDTH = (1, 16, 64, 128, 256, 1024), 768
NUM_MATRICES = 12  # 28 MB in float32, so that a core's own cache does not hold them
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_BYTES, NUM_LAUNCHES = 64 << 20, 2000
NUM_TRIALS = 5
TRANSPORTS = ("direct", "gloo")


def measure_rates(world: World) -> dict[str, Any]:
    """Return the fields of a Calibration that are rates, but for `links`. All ranks call it together."""
    return {
        "products": {name: _measure_products(dtype) for name, dtype in DTYPES.items()},
        "bytes_per_second": _measure_memory(),
        "launch_seconds": _measure_launch(),
        "moves": {transport: measure_moves(world, transport=transport) for transport in TRANSPORTS},
    }


def _measure_products(dtype: torch.dtype) -> dict[str, float]:
    matrices = [torch.ones(WIDTH, WIDTH, dtype=dtype) for _ in range(NUM_MATRICES)]
    rates: dict[str, float] = {}
    for rows in ROWS:
        left = torch.ones(rows, WIDTH, dtype=dtype)

        def multiply(left: Tensor = left) -> None:
            for each in matrices:
                functional.linear(left, each)

        rates[str(rows)] = 2 * rows * WIDTH**2 * NUM_MATRICES / _least_seconds(multiply)
    return rates


def _measure_memory() -> float:
    """Return the bytes that an addition reads and writes in a second."""
    source = torch.ones(NUM_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * NUM_BYTES / _least_seconds(lambda: torch.add(source, 1.0, out=target))


def _measure_launch() -> float:
    one = torch.ones(1)

    def launches() -> None:
        for _ in range(NUM_LAUNCHES):
            torch.add(one, one)

    return _least_seconds(launches) / NUM_LAUNCHES


def _least_seconds(do: Callable[[], object]) -> float:
    """Return the least seconds of a few trials of the slowest rank; the first runs cold."""
    seconds: list[float] = []
    for _ in range(1 + NUM_TRIALS):
        worlds.barrier()
        began = time.perf_counter()
        do()
        seconds.append(time.perf_counter() - began)
    return max(worlds.gather_objects(min(seconds[1:])))
