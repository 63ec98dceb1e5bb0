"""The interface between the training loop and every engine, hand-written or native.

[Note: who divides] The loss handed to `backward` is this rank's share of the global loss: the sum over its valid
tokens divided by the number of valid tokens of *all* ranks and microbatches of the step. The gradient of the step
is therefore the plain sum over ranks and microbatches; engines that average multiply by the world size first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

# An OptimizerFactory takes parameter groups as torch.optim takes them and makes the rank-local optimizer.
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]


@dataclass
class ModelStates:
    """The tensors this rank holds now, by kind. Views and aliases are allowed: bytes are counted by storage."""

    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    optimizer: list[Tensor] = field(default_factory=list)
    master: list[Tensor] = field(default_factory=list)
    secondary: list[Tensor] = field(default_factory=list)  # copies of parameters for one's node
    buffers: list[Tensor] = field(default_factory=list)  # memory units are gathered into, buckets
    # Of seldom synchronised replicas: weights before the interval, momentum of the outer optimizer (zero/outer.py).
    outer: list[Tensor] = field(default_factory=list)
    hidden_bytes: int = 0  # in buffers that no tensor shows (DistributedDataParallel's buckets)
    # What rests on the host beside the device, of any kind; None where nothing is kept there.
    host: list[Tensor] | None = None
    # The part of it in a file, and how much of that lies in memory.
    files: list[Tensor] | None = None
    resident_bytes: int | None = None


@dataclass(frozen=True)
class Piece:
    """A contiguous range of one parameter's flattened elements that this rank holds."""

    start: int
    tensor: Tensor  # one-dimensional, `tensor.numel()` elements from `start` on


@dataclass
class CanonicalTensor:
    shape: tuple[int, ...]
    dtype: Any
    pieces: list[Piece]


# A CanonicalState maps each parameter's name to what this rank holds of its "weight" and of each optimizer moment
# ("exp_avg", "exp_avg_sq", "step", ...).
CanonicalState = dict[str, dict[str, CanonicalTensor]]


class Strategy(Protocol):
    """One engine: ours is zeroexp/zero/engine.py, torch's and DeepSpeed's are in zeroexp/engines/.

    The caller calls `model` as before; the parallelism happens in its hooks.
    An engine may also have `settings`, a dict of what it chose where the config leaves a choice open.
    """

    model: nn.Module
    optimizer: Optimizer  # rank-local; its rates are set, and hooks on its steps take their times

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context around one microbatch's forward and backward; `last` marks the last one before `step`."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Run the backward of this rank's share of the global loss, see [Note: who divides]. Ours: zero/engine.py."""
        ...

    def step(self, *, drain: bool = False) -> Tensor:
        """Finish the reduction, clip, update and publish. Return the global gradient norm before clipping (0-dim).

        An engine may leave the published parameters in flight, for the next forward to wait for. With `drain` nothing
        is in flight afterwards, and the parameters may be read outside of `model`.
        """
        ...

    def zero_grad(self) -> None: ...

    def model_states(self) -> ModelStates:
        """Return what this rank holds, with nothing in flight."""
        ...

    def state_dict(self) -> CanonicalState:
        """Return this rank's pieces as views of live memory, with nothing in flight."""
        ...

    def load_state_dict(self, state: CanonicalState) -> None: ...
