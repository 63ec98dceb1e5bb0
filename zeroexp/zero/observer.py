"""Events of the engine, in the order in which they happen, for an observer that may raise and computes nothing.

Without one the engine trains the same model from code that does nothing wrong; engines/sharded.py gives every engine of
ours the observer of zero_safety/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zeroexp.cut.stage import Stage
from zeroexp.interface.strategy import OptimizerFactory
from zeroexp.interface.values import Values
from zeroexp.process.world import World
from zeroexp.zero.held import Held
from zeroexp.zero.options import Dtypes, Options
from zeroexp.zero.unit import Unit


@dataclass(frozen=True)
class Arguments:
    """What `Engine` is built with."""

    module: nn.Module
    blocks: Sequence[str]
    stage: Stage
    param_groups: Sequence[dict[str, Any]]
    optimizer_factory: OptimizerFactory
    world: World
    dtypes: Dtypes | None
    max_grad_norm: float | None
    options: Options
    values: Values | None
    scales_loss: bool


class Observer:
    """An observer that lets everything pass."""

    def building(self, arguments: Arguments) -> None:
        """An engine is to be built; nothing has been touched."""

    def held(self, held: Held) -> None:
        """The engine holds the parameters of a chunk from now on; they have their values."""

    def built(self, engine: Any) -> None:
        """The `Engine` is built, which imports this file."""

    def begin_microbatch(self) -> None:
        """A microbatch is about to begin."""

    def showing(self, held: Held, *, there: bool) -> None:
        """The parameters of a chunk are about to show their values, or, where these are not `there`, nan."""

    def released(self, unit: Unit, gather_again: Callable[[], None]) -> None:
        """Values of the unit are not there: whoever uses a parameter of it must `gather_again` first.

        It is the root, freed before its last gradients, or a unit that is published beyond the step.
        """

    def returned(self, unit: Unit, tensor: Tensor) -> None:
        """The module of `unit` has run and returns `tensor`, perhaps among others."""

    def gradient(self, unit: Unit, parameter: nn.Parameter, *, is_reduced: bool) -> None:
        """A parameter got its gradient. `is_reduced`: those of this microbatch had been reduced."""

    def backward_ended(self) -> None:
        """`Strategy.backward` has run: the gradients of the parameters are the engine's."""

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

    def weights_changed(self, *, stepped: bool = False, are_equal: bool = True) -> None:
        """The engine has changed the weights: by a step where `stepped`, else by loading or writing them.

        are_equal: all replicas have the same now.
        """

    def saving(self) -> None:
        """The engine is about to return its state."""

    def loading(self) -> None:
        """A state is about to be loaded."""

    def zero_grad(self) -> None:
        """Gradients are about to be cleared."""
