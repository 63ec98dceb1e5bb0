"""The observer of engines/sharded.py: each event (zero/observer.py) goes to the files that it concerns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroexp.comm.collectives import Collectives
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.stage import Placement, Stage
from zeroexp.interface.elementwise import refuse_unless_elementwise
from zeroexp.interface.strategy import OptimizerFactory
from zeroexp.interface.values import Values
from zeroexp.process.world import World
from zeroexp.zero.held import Held, unguarded
from zeroexp.zero.observer import Observer
from zeroexp.zero.options import Options
from zeroexp.zero.unit import Unit
from zeroexp.zero.whole import written_while_reading
from zeroexp.zero_safety.arguments import refuse_arguments
from zeroexp.zero_safety.call_order import CallOrder
from zeroexp.zero_safety.changed_parameters import ParameterWatch, is_compared
from zeroexp.zero_safety.guard import (
    await_on_use,
    guard_parameters,
    guard_values,
    mark_gradient_taken,
)
from zeroexp.zero_safety.kept_views import KeptViews, is_view_of_freed
from zeroexp.zero_safety.methods import OwnMethods
from zeroexp.zero_safety.pieces import OwnPieces
from zeroexp.zero_safety.replicas_differ import refuse_different_replicas


class Refusals(Observer):
    """An observer that raises where code around an engine would silently train another model."""

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
        refuse_arguments(
            module, blocks, param_groups, stage, options, max_grad_norm, values, world.size
        )
        if world.is_fake:  # the trial of the optimizer compares values
            return
        shards = stage.optimizer is Placement.SHARD and world.size > 1
        words = {group.get("layout", options.layout) for group in param_groups}
        cuts = shards and not all(LAYOUTS[word].has_owners for word in words)
        refuse_unless_elementwise(
            optimizer_factory, param_groups, layout=options.layout, cut=cuts, shared=shards
        )

    def held(self, held: Held) -> None:
        guard_parameters(held)

    def built(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        optimizer: Optimizer,
        zero_grad: Callable[..., None],
        wire: Collectives,
    ) -> None:
        self._is_alone = wire.world.size == 1 and not any(unit.is_sharded for unit in units)
        self._are_taken = False  # whether gradients are marked as taken
        self._units, self._wire = units, wire
        self._num_equal = 0  # steps that have left all replicas the same weights
        # A second last microbatch would sum again what was summed between replicas.
        has_replicas = wire.holders.size > 1
        self._calls = CallOrder(once=has_replicas or any(u.reduces_at_hand_over for u in units))
        self._parameters = ParameterWatch(module, units, wire.world)
        self._views = KeptViews(unit for unit in units if unit.is_sharded)
        self._methods = OwnMethods(module, optimizer, zero_grad)
        self._pieces = OwnPieces(optimizer)

    def begin_microbatch(self) -> None:
        self._calls.begin_microbatch()
        try:
            self._parameters.refuse_changes()
        except RuntimeError:
            self._calls.abandon_microbatch(reduced=False)
            raise
        self._mark_gradients(taken=False)

    def shown(self, held: Held, *, there: bool) -> None:
        guard_values(held, there=there)

    def released(self, unit: Unit, gather_again: Callable[[], None]) -> None:
        for parameter in unit.parameters:
            await_on_use(parameter, gather_again)

    def returned(self, unit: Unit, tensor: Tensor) -> None:
        if is_view_of_freed(tensor, unit):
            raise RuntimeError(
                f"{unit} returns a view of its parameters (shape {list(tensor.shape)}), which are freed when "
                "its module has run: return a clone, or make it part of a larger unit"
            )

    def gradient(self, unit: Unit, parameter: nn.Parameter, *, is_reduced: bool) -> None:
        if _somebody_took_gradient(parameter):
            raise RuntimeError(
                f"a hook of {unit} has taken a gradient before the engine reduced it over the ranks: an optimizer "
                "inside backward updates by one rank's gradient; call strategy.step() instead"
            )
        if is_reduced:
            raise RuntimeError(
                f"{unit} got a gradient after its gradients of this microbatch were reduced: call "
                "strategy.backward once in a microbatch, with the sum of the losses (use loss.backward() for all "
                "but the last), and compute penalties on weights after the model's forward"
            )

    def backward_ended(self) -> None:
        self._mark_gradients(taken=True)

    def end_microbatch(self, *, last: bool) -> None:
        self._mark_gradients(taken=True)
        self._calls.end_microbatch(last=last)
        self._views.refuse()
        if not self._is_alone:
            self._parameters.refuse_writes()

    def abandon_microbatch(self, *, reduced: bool) -> None:
        self._calls.abandon_microbatch(reduced=reduced)

    @contextmanager
    def gathered(self, *, write: bool, in_microbatch: bool) -> Iterator[None]:
        with self._methods.loading(allowed=write):
            yield
        if in_microbatch:
            return  # its end refuses what was written
        reads_only = not (write or self._methods.may_load or self._is_alone)
        if reads_only and self._parameters.were_written():
            raise written_while_reading()
        self._parameters.note_versions()

    def step(self, *, is_gathered: bool) -> None:
        self._calls.step(is_gathered=is_gathered)
        self._parameters.refuse_writes_between()

    @contextmanager
    def updating(self) -> Iterator[None]:
        with self._pieces.updating(), self._methods.stepping():
            yield

    def weights_changed(self, *, stepped: bool = False, are_equal: bool = True) -> None:
        self._parameters.note_versions(stepped=stepped)
        if stepped and are_equal:
            self._num_equal += 1
            if is_compared(self._num_equal):
                refuse_different_replicas(self._units, self._wire)

    def zero_grad(self) -> None:
        self._calls.zero_grad()
        self._mark_gradients(taken=False)

    def _mark_gradients(self, *, taken: bool) -> None:
        if taken is self._are_taken:
            return
        self._are_taken = taken
        for unit in self._units:
            for parameter in unit.trainable_parameters:
                mark_gradient_taken(parameter, taken=taken)


def _somebody_took_gradient(parameter: nn.Parameter) -> bool:
    """Tell whether an earlier hook took the gradient; without other hooks a custom function may have given none."""
    with unguarded():
        hooks = parameter._post_accumulate_grad_hooks
        return parameter.grad is None and hooks is not None and len(hooks) > 1
