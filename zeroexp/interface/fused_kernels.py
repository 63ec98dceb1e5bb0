"""Trial whether torch's fused kernel of an optimizer computes what its loop does, before weights are given to it.

A kernel may be wrong in one dtype on one kind of device: torch 2.13's fused SGD leaves full vectors of 16-bit weights
as they are on CPUs, and says nothing. So none is taken on trust, and none is named here: 64 elements make three steps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import _disable_current_modes

HAVE_ONE = {optim.Adagrad, optim.Adam, optim.AdamW, optim.SGD}
NUM_ELEMENTS, NUM_STEPS, LR = 64, 3, 0.125  # several full vectors of any CPU
TOLERANCE = 0.25  # of how far the loop moves them: kernels round less often than it, a wrong one moves them elsewhere


def fused_is_right(kind: type[Any], parameter: Tensor, momentum: float = 0.0) -> bool:
    """Tell whether the fused kernel of one of HAVE_ONE steps tensors like `parameter` as torch's loop does.

    torch has no fused SGD for DTensors, as the shards of FSDP2 are.
    """
    if hasattr(parameter, "placements") and kind is optim.SGD:
        return False
    options = {"momentum": momentum} if kind is optim.SGD and momentum else {}
    return parameter.is_meta or _is_right(
        kind, parameter.dtype, parameter.device, tuple(options.items())
    )


@cache
def _is_right(
    kind: type[Any], dtype: torch.dtype, device: torch.device, options: tuple[tuple[str, Any], ...]
) -> bool:
    with _disable_current_modes(), torch.enable_grad():  # a rehearsal's tensors have no values
        loop, fused = (
            _distance(kind, dtype, device, {**dict(options), "fused": fused})
            for fused in (False, True)
        )
        return bool((loop - fused).abs().max() <= TOLERANCE * loop.abs().max())


def _distance(
    kind: type[Any], dtype: torch.dtype, device: torch.device, options: dict[str, Any]
) -> Tensor:
    """Return how far each element moves from zero, in float32."""
    weight = nn.Parameter(torch.zeros(NUM_ELEMENTS, dtype=dtype, device=device))
    optimizer = kind([weight], lr=LR, **options)
    for _ in range(NUM_STEPS):
        weight.grad = (torch.arange(NUM_ELEMENTS, device=device) % 4 + 1).to(dtype)
        optimizer.step()
    return weight.detach().float()
