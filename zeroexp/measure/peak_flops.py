"""What a rank could compute at most: the rate of a large product of matrices, measured on all ranks at once."""

from __future__ import annotations

import time

import torch

from zeroexp.world import World, barrier

NUM_TRIALS = 5
SIZE = {"cpu": 768, "cuda": 8192}  # rows of a square matrix: a hundredth of a second


def calibrate(world: World, dtype: torch.dtype) -> float:
    """Return the operations per second of the fastest of a few products; all ranks call it together.

    Ranks that share cores slow one another down here as they do in training.
    """
    size = SIZE.get(world.device.type, SIZE["cpu"])
    left, right = (torch.ones(size, size, dtype=dtype, device=world.device) for _ in range(2))
    barrier()
    return 2 * size**3 / min(_seconds(left, right) for _ in range(NUM_TRIALS))


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    began = time.perf_counter()
    product = left @ right
    if product.device.type == "cuda":
        torch.cuda.synchronize(product.device)
    return time.perf_counter() - began
