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

from zeroexp.measure.record import Traffic

# Takes parameter groups as torch.optim takes them, makes the rank-local optimizer.
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]


@dataclass
class ModelStates:
    """The tensors this rank holds now, by kind; views and aliases are allowed, bytes are counted by storage."""

    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    optimizer: list[Tensor] = field(default_factory=list)
    master: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)  # pools, buckets
    hidden_bytes: int = 0  # of buffers which no tensor shows (buckets of DistributedDataParallel)
    num_private_units: int = 0  # found their pool in use and got memory of their own


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


# Parameter name -> "weight" and each optimizer moment ("exp_avg", "exp_avg_sq", "step", ...) -> what this rank holds.
CanonicalState = dict[str, dict[str, CanonicalTensor]]


class Strategy(Protocol):
    """One engine. `model` is called as before; parallelism hides in its hooks."""

    model: nn.Module
    settings: dict[
        str, Any
    ]  # what it ran with where the config left it open; None: it has no such thing
    optimizer: Optimizer  # rank-local; only its param_groups (learning rate) are read and written

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Forward and backward of one microbatch happen inside; `last` is the last one before `step`."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Backward of this rank's share of the global loss, see [Note: who divides]."""
        ...

    def step(self) -> Tensor:
        """Finish reducing, clip, update, publish. Returns the global gradient norm before clipping (0-dim)."""
        ...

    def zero_grad(self) -> None: ...

    def drain(self) -> None:
        """Wait for everything still in flight; afterwards the parameters may be read outside of `model`."""
        ...

    def model_states(self) -> ModelStates: ...

    @property
    def shared_bytes(self) -> int:
        """Memory this rank holds that torch's allocator does not see, so that a peak can be told whole."""
        ...

    def take_traffic(self) -> Traffic:
        """What this rank sent since the last call, by kind; empty where the engine does not tell."""
        ...

    def state_dict(self) -> CanonicalState: ...

    def load_state_dict(self, state: CanonicalState) -> None: ...
