"""What an engine tells the observer that watches it. An observer may raise; it changes nothing that is computed.

Without one the engine trains the same model from code that does nothing wrong; refusals/ is the observer of every
engine. Events stand in the order in which they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroexp.comm.collectives import Collectives
from zeroexp.cut.stage import Stage
from zeroexp.interface.strategy import OptimizerFactory
from zeroexp.interface.values import Values
from zeroexp.process.world import World
from zeroexp.sharding.options import Options
from zeroexp.sharding.unit import Unit


class Observer:
    """An observer that lets everything pass."""

    def building(
        self,
        module: nn.Module,
        blocks: Sequence[str],
        param_groups: Sequence[dict[str, Any]],
        optimizer_factory: OptimizerFactory,
        stage: Stage,
        options: Options,
        max_grad_norm: float | None,
        values: Values | None,
        world: World,
    ) -> None:
        """An engine is to be built from these; nothing has been touched."""

    def built(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        optimizer: Optimizer,
        zero_grad: Callable[..., None],
        wire: Collectives,
    ) -> None:
        """The engine around `module` is built; `zero_grad` is its own."""

    def begin_microbatch(self) -> None:
        """A microbatch is about to begin."""

    def returned(self, unit: Unit, tensor: Tensor) -> None:
        """The module of `unit` has run and returns `tensor`, perhaps among others."""

    def gradient(self, unit: Unit, *, is_reduced: bool) -> None:
        """A parameter got its gradient. `is_reduced`: those of this microbatch had been reduced."""

    def end_microbatch(self, *, last: bool) -> None:
        """All gradients of the microbatch are on their way, and nothing is gathered ahead."""

    def abandon_microbatch(self, *, reduced: bool) -> None:
        """An exception has ended the microbatch. `reduced`: some of its gradients had been reduced."""

    def gathered(self, *, write: bool, in_microbatch: bool) -> AbstractContextManager[None]:
        """Inside of what is returned all parameters are shown whole."""
        return nullcontext()

    def step(self, *, is_gathered: bool) -> None:
        """A step is about to begin. `is_gathered`: inside of `gathered`."""

    def updating(self) -> AbstractContextManager[None]:
        """Inside of what is returned the optimizer updates this rank's pieces by their gradients."""
        return nullcontext()

    def weights_changed(self, *, stepped: bool = False) -> None:
        """The engine has changed the weights, by a step or by loading them."""

    def zero_grad(self) -> None:
        """Gradients were cleared."""
