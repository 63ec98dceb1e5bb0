"""The engine: microbatch, backward and step. Every hand-written stage and implementation is this one class.

ZeRO-1, -2 and -3 differ in the `Stage` that the engine is given; parameter-, tensor- and buffer-level in the
layout. The step below is the whole algorithm; the other files of this folder define its verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.comm.collectives import Collectives
from zeroexp.cut.stage import Stage
from zeroexp.interface.canonical import WEIGHT, canonical_of_one_rank
from zeroexp.interface.held_pieces import ALONE, HeldPiece
from zeroexp.interface.loss_scale import LossScale
from zeroexp.interface.optimizer_trial import make_optimizer, moments_kept
from zeroexp.interface.saved_state import SavedState, names_in
from zeroexp.interface.strategy import CanonicalState, ModelStates, OptimizerFactory
from zeroexp.interface.values import Values, make_placeholders
from zeroexp.measure.communication_overlap import meter
from zeroexp.process.world import World
from zeroexp.zero.assemble import make_units, start_alike
from zeroexp.zero.casts import cast_at_borders
from zeroexp.zero.gathered_parameters import gathered
from zeroexp.zero.grouping import group_parameters, groups_of_lists
from zeroexp.zero.held import unguarded
from zeroexp.zero.matrices import bring_matrices_together
from zeroexp.zero.observer import Arguments, Observer
from zeroexp.zero.options import Dtypes, Options, own_dtypes
from zeroexp.zero.outer import MOMENTUM, OuterStep, prefix_of
from zeroexp.zero.saved_views import SavedViews
from zeroexp.zero.schedule import Schedule
from zeroexp.zero.step_sums import StepSums
from zeroexp.zero.unit import OptimizerInput, Unit


class Engine:
    """The engine trains `module` under one stage. The optimizer sees this rank's pieces only.

    Callers may read the parts `units` and `wire`, and must not change them.
    """

    observed_by: type[Observer] = Observer  # engines/sharded.py names the one that refuses mistakes
    # Trainable parameters, by number, whose gradients were zeroed and not dropped: they have one in the next step.
    _zeroed: Set[int] = frozenset()
    # Whether a microbatch ended since the last step: `zero_grad` then throws its gradients away.
    _may_discard = False

    def __init__(
        self,
        module: nn.Module,
        *,
        blocks: Sequence[str],
        stage: Stage,
        param_groups: Sequence[dict[str, Any]],
        optimizer_factory: OptimizerFactory,
        world: World,
        dtypes: Dtypes | None = None,
        max_grad_norm: float | None = None,
        options: Options | None = None,
        values: Values | None = None,
        scales_loss: bool = False,
    ):
        """Build the engine.

        values: what the parameters of a module on meta are to hold. scales_loss: see interface/loss_scale.py.
        """
        param_groups = groups_of_lists(param_groups, optimizer_factory)
        options = (options or Options()).with_optimizer_over_of(param_groups)
        self._observer = self.observed_by()
        trained = module, blocks, stage, param_groups, optimizer_factory
        carried_out_by = world, dtypes, max_grad_norm, options, values, scales_loss
        self._observer.building(Arguments(*trained, *carried_out_by))
        dtypes = (dtypes or own_dtypes(module)).with_masters_of(param_groups)
        stage = options.stage_for(stage, world.size)
        if values is not None:
            make_placeholders(module, world.device)
        # torch can not convert modules of fake tensors, and a fake world is given a model that lies on its device.
        self.model = module if world.is_fake else module.to(world.device)
        self._stage, self._max_grad_norm = stage, max_grad_norm
        self.wire = Collectives(world, options)
        settings = [str(stage), options, dtypes, max_grad_norm, list(blocks), scales_loss]
        start_alike(self.model, settings, param_groups, values, self.wire)
        self.wire.connect()
        options = options.resolved(stage, self.wire.traits, world.size)
        self.settings = options.as_record(stage, self.wire.traits, self.wire.traits_between)
        groups = group_parameters(module, blocks, options.unit, param_groups, dtypes.of_modules)
        cast_at_borders(module, dtypes)
        self.units = make_units(groups, stage, options, dtypes, self.wire, self._observer, values)
        self._schedule = Schedule(
            self.units, self.wire, options, self._observer, scales_loss=scales_loss
        )
        self._saved = SavedViews(self._schedule)
        for unit, group in zip(self.units, groups, strict=True):
            if unit in self._schedule.watched:
                self._schedule.attach(unit, group.module)
        self._trainable = [p for unit in self.units for p in unit.trainable_parameters]
        masters = _masters_in_groups(self.units, param_groups)
        with self.wire.bus.at(self.wire.bus.places[0]):
            self.optimizer = make_optimizer(optimizer_factory, masters)
        self._loss_scale = LossScale(self.optimizer, is_used=scales_loss, is_fake=world.is_fake)
        bring_matrices_together(self.optimizer, self.units, stage, self.wire, options.matrix_step)
        self._outer = OuterStep(self.units, self.wire, options.outer, dtypes.master)
        names = names_in(module, param_groups)
        kept = moments_kept(optimizer_factory, param_groups)
        self._saved_state = SavedState(module, world, self.optimizer, names, kept)
        self._reads_late = world.device.type != "cpu" and not world.is_fake
        # Of the last step, where that is not read yet, see step_sums.py, [Note: without a stop].
        self._expect_same_gathers: Callable[[], None] = lambda: None
        self._observer.built(self)

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self._observer.begin_microbatch()
        self._schedule.begin_microbatch(last=last)
        try:
            with self._saved.watch():
                yield
            self._schedule.end_microbatch()
        except BaseException as error:
            try:
                self._schedule.abandon_microbatch()
            except Exception as further:  # a peer is gone; what ended the microbatch is to be told
                error.add_note(str(further))
            raise
        finally:
            self._may_discard = True

    def backward(self, loss: Tensor) -> None:
        """Run backward, of which hooks tell the schedule, which reduces what has its gradients.

        It launches a reduction when a bucket is complete (`Schedule.gradient_ready`) or, where a gather needs all
        ranks, when backward enters the module before (`Schedule.before_backward`).
        """
        try:
            with self._schedule.closing_backward(self._loss_scale.multiply(loss)) as loss:
                loss.backward()
        finally:
            self._observer.backward_ended()

    @contextmanager
    def gathered(self, *, write: bool = False) -> Iterator[None]:
        """Show all parameters whole inside; all ranks enter and leave together, see gathered_parameters.py."""
        if write:
            self._outer.require_joined("gathered(write=True)")
        with (
            self._observer.gathered(write=write, in_microbatch=self._schedule.in_microbatch),
            gathered(self.units, self._schedule, self.wire, write=write),
        ):
            yield

    def step(self, *, drain: bool = False) -> Tensor:
        """Hand over the reduced gradients, clip, update all masters at once, publish unit by unit; return the norm."""
        self._observer.step(is_gathered=any(unit.is_pinned for unit in self.units))
        self._schedule.drain_collectives()
        with meter.timing("hand_over", "all units"), unguarded():
            handed = [each for unit in self.units for each in unit.hand_over()]
        self.wire.quiesce()
        self._loss_scale.divide(each.gradient for each in handed)
        self.wire.bus.to_host([(each.master, each.gradient) for each in handed])
        sums = StepSums(self._trainable, handed, self._stage, self.wire, self._have_gradients())
        self._compare_gathers(sums)
        # Without clipping the sum of the norm may arrive during the update.
        scale = self._scale(sums)
        try:
            if self._loss_scale.allows(lambda: self._outer.norm(sums)):
                self._update(sums.with_gradient(), scale)
        except BaseException:
            with suppress(Exception):  # the error that ended the step is the one to raise
                for unit in self.units:  # where all ranks raise alike they may go on, and gather
                    unit.expose()
            raise
        self._may_discard = False
        # What codecs left out is in units of the scale before, and may be inf.
        if self._loss_scale.has_changed:
            self._forget_residuals()
        are_equal = self._outer.after_update()
        # With `drain` nothing is gathered ahead: it would be in flight when the step ends.
        for unit in self.units:
            self._schedule.gathers.publish(unit, ahead=not drain)
        # A backward of a forward from before this step then raises, as in torch.
        torch.autograd.graph.increment_version(self._trainable)
        if are_equal:
            self._saved_state.buffers.share()
        for unit in self._schedule.gathers.leave_published(await_all=drain):
            self._observer.released(unit, unit.arrive)
        self._observer.weights_changed(stepped=True, are_equal=are_equal)
        if drain:
            self.drain()
        return self._outer.norm(sums)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients; `model.zero_grad()` and `optimizer.zero_grad()` call this too.

        set_to_none: False: a parameter that has had a gradient has one of zeros then, by which its moments still move
        it in a step in which no backward reaches it.
        """
        self._observer.zero_grad()
        if self._may_discard:
            self._forget_residuals()
        self._may_discard = False
        if not self._schedule.has_lost:  # else peers may be gone
            self._schedule.finish_reductions()  # what they would keep is cleared
        self._zeroed = frozenset() if set_to_none else self._with_gradients()
        for unit in self.units:
            unit.zero_grad()

    def drain(self) -> None:
        """Wait for everything in flight and, where it is read late, for what is refused: other gathers, other shapes.

        What was gathered ahead stays. Like `model_states` and `state_dict` it concerns this rank alone: one rank may
        call it where others do not.
        """
        self._schedule.wait()
        self._expect_same_gathers()
        self._saved_state.buffers.require_shapes()

    def model_states(self) -> ModelStates:
        self.drain()
        states = ModelStates(hidden_bytes=self.wire.staging_bytes)
        for unit in self.units:
            for kind, tensors in unit.states().items():
                getattr(states, kind).extend(tensors)
        states.outer.extend(self._outer.tensors)
        return self.wire.bus.counted_apart(states, self.optimizer.state)

    def state_dict(self) -> CanonicalState:
        self._observer.saving()
        self._expect_same_gathers()
        self._schedule.wait_for_weights()
        self._outer.require_joined("state_dict()")
        state = self._saved_state.of(
            self._held_pieces(),
            prefix=prefix_of(self._outer.replica),
            beside={MOMENTUM: self._outer.momentum_of},
        )
        for name, parameter in self.model.named_parameters():
            if not parameter.numel():  # no unit holds an empty parameter
                state[name] = {WEIGHT: canonical_of_one_rank(parameter)}
        return state

    def load_state_dict(self, state: CanonicalState) -> None:
        self._observer.loading()
        self._schedule.drain_collectives()
        targets = self._held_pieces()
        self._saved_state.load(
            self._outer.own_state(state),
            targets,
            same_everywhere=self.wire.same_everywhere,
            before_writes=self.wire.quiesce,
            keeping=lambda tensor: self.wire.bus.keeping([tensor], self.optimizer.state),
        )
        self._outer.load(state, targets)
        self._forget_residuals()
        for unit in self.units:
            self._schedule.gathers.publish(unit, ahead=False)
        self._schedule.gathers.await_published()
        torch.autograd.graph.increment_version(p for unit in self.units for p in unit.parameters)
        self._observer.weights_changed()

    def _held_pieces(self) -> list[HeldPiece]:
        """Return what this rank holds of each parameter, ungathered; masters must be published after they are filled.

        The master is the canonical weight. Ranks that hold the same elements are all ranks for what is whole, and
        replicas for what is sharded and equal (outer.py, [Note: states]).
        """
        share_of_moments = ALONE if self._outer.has_own_moments else None
        return [
            HeldPiece(
                held.chunk.members[span.member].name,
                tuple(held.shapes[span.member]),
                weight,
                span.start,
                has_moments=held.is_trainable,
                share=(held.shared_by.rank, held.shared_by.size),
                share_of_moments=share_of_moments,
            )
            for unit in self.units
            for held in unit.held
            for span, weight in held.weights()
        ]

    def _forget_residuals(self) -> None:
        """Forget what codecs left out of gradients that were never used, or of other weights' ones."""
        for unit in self.units:
            unit.forget_residuals()

    def _have_gradients(self) -> list[bool]:
        """Tell for each trainable parameter whether it has a gradient on this rank."""
        of_units = (each for unit in self.units for each in unit.gradients)
        came = (present for gradients in of_units for present in gradients.present)
        return [present or number in self._zeroed for number, present in enumerate(came)]

    def _with_gradients(self) -> Set[int]:
        """Return the numbers of the parameters that got a gradient on this rank, reduced or not."""
        with unguarded():
            left = {number for number, p in enumerate(self._trainable) if p.grad is not None}
        return left | {number for number, has in enumerate(self._have_gradients()) if has}

    def _compare_gathers(self, sums: StepSums) -> None:
        """Raise RuntimeError if ranks gathered differently: in this step, or where reading stops, in the one before."""
        expect_same = sums.start_comparing_gathers()
        if self._reads_late:
            expect_same, self._expect_same_gathers = self._expect_same_gathers, expect_same
        expect_same()

    def _scale(self, sums: StepSums) -> Tensor | None:
        """Return the factor for gradients, or None where they stay bit for bit as they are."""
        clips, is_read = None, not (self._reads_late or self.wire.world.is_fake)
        if self._max_grad_norm is not None:
            clips = (self._max_grad_norm / (self._outer.norm(sums) + 1e-6)).clamp(max=1.0)
            if is_read and float(clips) == 1.0:  # the norm is below the maximum
                clips = None
        return self._outer.factor(clips)

    def _update(self, handed: Sequence[OptimizerInput], scale: Tensor | None) -> None:
        """Run one step of the optimizer on all masters that have a gradient, one place after the other."""
        self._outer.before_update()
        bus = self.wire.bus
        # Copied before an update of the device begins, for whose end they would wait.
        scales = {p: scale if scale is None else scale.to(bus.device_of(p)) for p in bus.places}
        rewind = _rewinder(self.optimizer)
        for place, own_scale in scales.items():
            if place != bus.places[0]:  # the updates of all places are one step
                rewind()
            there = [each for each in handed if bus.place_of(each.master) == place]
            with bus.at(place):
                gradients = bus.gradients([(e.master, e.gradient) for e in there], place)
                if own_scale is not None and gradients:
                    torch._foreach_mul_(gradients, own_scale)
            self._step_optimizer([each.master for each in there], gradients)

    def _step_optimizer(self, masters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        with unguarded():
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
        keeping = self.wire.bus.keeping(masters, self.optimizer.state)
        try:
            with self._observer.updating(), keeping:
                self.optimizer.step()
        finally:
            with unguarded():
                for master in masters:
                    master.grad = None


def _rewinder(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a call that sets what the optimizer counts, in its groups or as attributes, back to what it is now."""
    options = [dict(group) for group in optimizer.param_groups]
    numbers = _numbers_of(optimizer)

    def rewind() -> None:
        for name in _numbers_of(optimizer):
            delattr(optimizer, name)
        vars(optimizer).update(numbers)
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(own)

    return rewind


def _numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the optimizer's attributes that are numbers."""
    return {
        name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)
    }


def _masters_in_groups(
    units: Sequence[Unit], param_groups: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the user's parameter groups, each parameter replaced by the masters that this rank holds of it."""
    masters: dict[nn.Parameter, list[nn.Parameter]] = {}
    for unit in units:
        for parameter, master in unit.parameters_with_masters():
            masters.setdefault(parameter, []).append(master)
    return [
        {**group, "params": [m for p in group["params"] for m in masters.get(p, ())]}
        for group in param_groups
    ]
