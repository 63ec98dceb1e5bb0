"""What a loop tells of itself: the plain model, what one process would do with it, and the code to verify."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

Step = Callable[[Sequence[Any]], object]  # takes this rank's microbatches


@dataclass(kw_only=True)
class Loop:
    """Return one from a function, and `zeroexp verify FILE:FUNCTION` runs it.

    `train` is your code as it is. Everything else says what it is meant to compute, and is what one process needs.
    """

    model: nn.Module  # as built, before it is sharded, replicated or cast
    loss: Callable[
        [Any, Any], Any
    ]  # (model, microbatch): the mean over its labels, or (sum, count)
    batch: Callable[[torch.Generator], Any]  # draws one microbatch of one rank
    optimizer: Callable[[nn.Module], Optimizer]  # of the plain model
    train: Callable[
        [Any], Step | tuple[Any, Step]
    ]  # shards the model; (sharded model, step) if it is another
    microbatches: int = 2  # of a rank in a step
    max_grad_norm: float | None = None
    dtype: torch.dtype = torch.float32  # in which forward and backward compute
    scheduler: Callable[[Optimizer], Any] | None = None


class NoLoop(ValueError):
    """A loop that can not be run or judged, in one line."""


def load(file: Path, function: str) -> Loop:
    """Import the file and call the function, with the same random numbers in every process."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        raise NoLoop(f"{file.name}:{function}: no such function; name one that returns a Loop")
    torch.manual_seed(0)
    loop = make()
    if not isinstance(loop, Loop):
        kind = type(loop).__name__
        raise NoLoop(f"{file.name}:{function}: returns {kind}; return a zeroexp.verify.Loop")
    _refuse(loop)
    return loop


def _refuse(loop: Loop) -> None:
    if loop.microbatches < 1:
        raise NoLoop(f"Loop(microbatches={loop.microbatches}): none; give at least 1")
    if any(parameter.is_meta for parameter in loop.model.parameters()):
        raise NoLoop("Loop(model=...): weights on meta have no values; build a small model plainly")
    for name, module in loop.model.named_modules():
        chance = getattr(module, "p", getattr(module, "dropout", 0.0))
        draws = "Dropout" in type(module).__name__ or isinstance(module, nn.MultiheadAttention)
        if draws and module.training and isinstance(chance, float) and chance > 0:
            raise NoLoop(
                f"{name}: dropout {chance:g} draws differently on each rank; build it with 0"
            )


def batch_of(loop: Loop, step: int, rank: int, microbatch: int) -> Any:
    """Return the same microbatch in every process that asks for it."""
    seed = (step * 1009 + rank) * 1009 + microbatch + 1
    return loop.batch(torch.Generator().manual_seed(seed))


def as_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return a microbatch with its real numbers in `dtype`."""

    def cast(leaf: Any) -> Any:
        is_real = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_real else leaf

    return tree_map(cast, batch)
