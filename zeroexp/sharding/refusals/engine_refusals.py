"""All that is refused of one engine, behind the events that the engine tells (observer.py)."""

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
from zeroexp.sharding.gathered import written_while_reading
from zeroexp.sharding.observer import Observer
from zeroexp.sharding.options import Options, refuse_replicas
from zeroexp.sharding.refusals.arguments import refuse_arguments
from zeroexp.sharding.refusals.calls import Calls
from zeroexp.sharding.refusals.changes import ParameterWatch
from zeroexp.sharding.refusals.differing_replicas import refuse_different_replicas
from zeroexp.sharding.refusals.kept_views import KeptViews, is_view_of_freed
from zeroexp.sharding.refusals.methods import OwnMethods
from zeroexp.sharding.refusals.pieces import OwnPieces
from zeroexp.sharding.unit import Unit


class EngineRefusals(Observer):
    """The observer of every engine: it raises where the code around would train another model without a word."""

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
        refuse_arguments(module, blocks, param_groups, stage, options, max_grad_norm, values)
        refuse_replicas(options.replicas, stage, world.size)
        if world.is_fake:  # the trial compares values
            return
        shards = stage.optimizer is Placement.SHARD and world.size > 1
        cuts = shards and not LAYOUTS[options.family].has_owners
        refuse_unless_elementwise(
            optimizer_factory, param_groups, family=options.family, cut=cuts, shared=shards
        )

    def built(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        optimizer: Optimizer,
        zero_grad: Callable[..., None],
        wire: Collectives,
    ) -> None:
        self._is_alone = wire.world.size == 1
        self._units, self._wire = units, wire
        # A second last microbatch would sum again what was summed between replicas.
        has_replicas = wire.holders.size > 1
        self._calls = Calls(once=has_replicas or any(u.reduces_at_hand_over for u in units))
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

    def returned(self, unit: Unit, tensor: Tensor) -> None:
        if is_view_of_freed(tensor, unit):
            raise RuntimeError(
                f"{unit} returns a view of its parameters (shape {list(tensor.shape)}), which are freed when "
                "its module has run: return a clone, or make it part of a larger unit"
            )

    def gradient(self, unit: Unit, *, is_reduced: bool) -> None:
        if is_reduced:
            raise RuntimeError(
                f"{unit} got a gradient after its gradients of this microbatch were reduced: call "
                "strategy.backward once in a microbatch, with the sum of the losses (use loss.backward() for all "
                "but the last), and compute penalties on weights after the model's forward"
            )

    def end_microbatch(self, *, last: bool) -> None:
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

    def weights_changed(self, *, stepped: bool = False) -> None:
        if self._parameters.note_versions(stepped=stepped):
            refuse_different_replicas(self._units, self._wire)

    def zero_grad(self) -> None:
        self._calls.zero_grad()
