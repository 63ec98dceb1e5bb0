"""The schedule decides when the moves of a step happen: ahead of their use, beside compute, or strictly after it.

    forward         block 0        block 1        block 2     |  backward     block 2        block 1
    compute         ######         ######         ######      |               ######         ######
    all-gather        gather 1 ....  gather 2 ....            |                 gather 1 ....
    reduce                                                    |                              reduce 2 ....

With `overlap=False` the same moves happen in the same order and each is waited for at once: this readable twin is bit
for bit equal and shows what overlap buys. reductions.py decides in which order reductions start.

[Note: when a unit is closed] Among the nodes that are ready, autograd runs the one created last. So when the gradient
of a module's output is about to be used, everything created after that output has run already: a unit whose first use
began after that module ended gets no further gradient and needs its parameters no more.

[Note: in step] Where every rank takes part in a gather (over messages, and in the backend's own collectives), all
ranks must issue gathers and reductions in one order. Ranks may get their gradients at different times; so a unit is
freed and reduced there when a module's backward begins, or at the end, and never when its last gradient comes.

[Note: which backward] Only the backward that `Strategy.backward` runs closes units and starts reductions. Another
backward (`torch.autograd.grad`, a plain `loss.backward()`) gathers units where it needs them; the gradients it leaves
in the parameters are reduced at the end of the microbatch. A backward inside the closing one (reentrant checkpointing)
may come several times to one parameter: its gradients are not counted, and the unit is closed in one of the other ways.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroexp.comm.base import Pending
from zeroexp.comm.collectives import Collectives
from zeroexp.sharding.calls import Calls
from zeroexp.sharding.pools import Private
from zeroexp.sharding.prefetch import GatherOrder
from zeroexp.sharding.reductions import Reductions
from zeroexp.sharding.saved import SavedWeights
from zeroexp.sharding.unit import Residence, Unit
from zeroexp.sharding.views import OwnViews

# The ticks (hooks run so far) at which a use of a module began and ended, and the number of its microbatch.
Ticks = tuple[int, int, int]

NO_TASK = -1  # autograd's task id where no backward runs


@dataclass
class Use:
    """This record tells how far a unit has come in this microbatch."""

    first: int | None = None  # tick at which the unit's first forward began
    running: list[int] = field(default_factory=list)  # ticks at which forwards began that still run
    in_backward: bool = False
    began: int = 0  # tick at which the forward began whose backward runs
    # Parameters that have no gradient yet.
    missing: set[nn.Parameter] = field(default_factory=set[nn.Parameter])
    closed: bool = False  # gradients are complete and parameters are needed no more
    # Parameters that got a gradient in a backward that does not close units.
    inner: set[nn.Parameter] = field(default_factory=set[nn.Parameter])
    # Whether autograd holds views of the memory in which the unit lies now, see saved.py [Note: raw views].
    recomputed: bool = False


class Schedule:
    """The schedule turns what happens in a pass into moves of units; hooks call its methods."""

    def __init__(
        self,
        units: Sequence[Unit],
        wire: Collectives,
        *,
        overlap: bool,
        prefetch: int,
        keep: str,
        reduce_each: str,
    ):
        self._units = list(units)  # the root first, then in order of definition
        self._device = wire.world.device
        self._overlap = overlap
        self._prefetch = prefetch if overlap else 0
        self._keep = keep
        # Where a gather needs all ranks, reductions start only at fixed places between gathers, see [Note: in step].
        self._in_step = any(u.is_sharded for u in units) and not wire.facts.moves_on_wait
        self._sharded = {u for u in units if u.is_sharded}
        self._uses = {unit: Use() for unit in units}
        self._tick = 0
        self._arriving: dict[Unit, Pending] = {}  # parameters in flight
        self._demanded: set[Unit] = set()  # sharded units whose parameters are in use
        self._gathers = GatherOrder()
        self._reductions = Reductions(units, wire, overlap=overlap, reduce_each=reduce_each)
        self._agreed = False
        self.num_private = 0  # units that found their pool in use and got their own memory
        self.calls = Calls(once=any(unit.reduces_at_hand_over for unit in units))
        self._microbatch = 0  # number of microbatches so far
        # Parameters that got no gradient in the previous microbatch.
        self._silent: dict[Unit, set[nn.Parameter]] = {unit: set() for unit in units}
        self._closing = False  # whether the backward that closes units runs
        self._pass: int | None = None  # autograd's task id of that backward
        self.saved = SavedWeights(self._sharded, self._make_ready_for_backward)
        self._views = OwnViews(self._sharded)

    # -- one microbatch ---------------------------------------------------------------------------

    def begin_microbatch(self, *, last: bool) -> None:
        self.calls.begin_microbatch()
        self._last = last
        self._microbatch += 1
        self._tick = 0
        self._gathers.rewind()
        self._reductions.begin_microbatch(last=last)
        for unit in self._units:
            self._silent[unit] = self._uses[unit].missing
            self._uses[unit] = Use(missing=set(unit.trainable_parameters()))

    def before_forward(self, unit: Unit) -> None:
        self._tick += 1
        use = self._uses[unit]
        use.first = use.first if use.first is not None else self._tick
        use.running.append(self._tick)
        if not unit.is_pinned:
            self._make_ready(unit)
        if _task() != NO_TASK and not self.saved.sees_what_is_saved():
            use.recomputed = True

    def after_forward(self, unit: Unit, *, differentiable: bool) -> Ticks:
        """Return when this use began and ended, for `before_backward` of its outputs."""
        self._tick += 1
        use = self._uses[unit]
        began = use.running.pop()
        here = unit in self._demanded and unit.residence is Residence.READY
        if here and not use.running and not use.in_backward:
            is_root = unit is self._units[0]
            stays = differentiable and (self._keep == "all" or (is_root and self._keep == "last"))
            if not stays:
                out = not differentiable or self._keep == "none" or unit.has_private_store
                self._free(unit, forget=out)
        return began, self._tick, self._microbatch if self.calls.in_microbatch else 0

    def watch_what_is_saved(self) -> AbstractContextManager[None]:
        """Return a context in which autograd saves gathered parameters so that backward finds them, see saved.py."""
        if not self._sharded:
            return nullcontext()
        return saved_tensors_hooks(self.saved.pack, self.saved.unpack)

    @contextmanager
    def closing_backward(self, loss: Tensor) -> Iterator[None]:
        """Let the backward of `loss` that runs inside close units, see [Note: which backward]."""
        if not self.calls.in_microbatch:
            raise RuntimeError(
                "backward outside of `with strategy.microbatch(last=...):`: run forward and backward inside it"
            )
        self._closing = True
        handle = loss.register_hook(self._note_pass) if loss.requires_grad else None
        try:
            yield
        finally:
            self._closing, self._pass = False, None
            if handle is not None:
                handle.remove()

    def _note_pass(self, _gradient: Tensor) -> None:
        self._closes()

    def _closes(self) -> bool:
        """Tell whether the backward that runs now is the one that closes units, and not one inside it."""
        if self._closing and self._pass is None:
            self._pass = _task()  # the hook on the loss runs before any other
        return self._closing and self._pass == _task()

    def before_backward(self, unit: Unit, ticks: Ticks) -> None:
        """Close the units used later and gather `unit`, since the gradient of its output is about to be used."""
        began, ended, microbatch = ticks
        if not self.calls.in_microbatch or microbatch != self._microbatch:
            raise RuntimeError(
                f"backward of {unit} outside of the microbatch in which its forward ran: run forward and backward "
                "inside the same `with strategy.microbatch(last=...):`"
            )
        closes = self._closes()
        for other, use in self._uses.items():
            if use.first is not None and use.first > ended:
                # A parameter that usually gets a gradient and has none yet may get it where no module tells of it.
                if closes and (self._in_step or use.missing <= self._silent[other]):
                    self._finish(other)
                else:
                    self._set_aside(other)
            elif use.in_backward and use.began > ended:
                self._set_aside(other)  # it was used twice: backward of the earlier use comes later
        if closes and not unit.is_root:
            self._let_root_go()
        if not self._uses[unit].closed:
            self._uses[unit].began = began
            self._make_ready_for_backward(unit)

    def _let_root_go(self) -> None:
        """Free the root once the head has had its backward, if nothing that is still to come has saved its weights.

        The embedding's gradient comes last, when most memory is in use, and needs no weights.
        """
        root = self._units[0]
        if self._keep == "all" or root not in self._demanded or not root.chunks:
            return
        is_idle = root.residence is Residence.READY and not self._uses[root].running
        if (
            not is_idle
            or root.is_pinned
            or self.saved.needs_root()
            or self._views.others_hold(root)
        ):
            return
        self._demanded.discard(root)
        self._uses[root].in_backward = False
        root.let_go(partial(self._make_ready_for_backward, root))

    def _make_ready_for_backward(self, unit: Unit) -> None:
        """Gather the unit if need be, also where no output told that backward reaches it, or reaches it again."""
        if not self.calls.in_microbatch:
            raise RuntimeError(
                f"backward of {unit} outside of `with strategy.microbatch(last=...):`"
            )
        self._uses[unit].in_backward = True
        self._make_ready(unit)

    def gradient_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        use = self._uses[unit]
        if not self.calls.in_microbatch:
            raise RuntimeError(
                f"{unit} got a gradient outside of `with strategy.microbatch(last=...):`, where nobody reduces it"
            )
        if self._reductions.is_complete(unit):
            raise RuntimeError(
                f"{unit} got a gradient after its gradients of this microbatch were reduced: call "
                "strategy.backward once in a microbatch, with the sum of the losses (use loss.backward() for all "
                "but the last), and compute penalties on weights after the model's forward"
            )
        if not self._closes():
            self._count_inner(unit, parameter)
            return
        use.missing.discard(parameter)
        if self._in_step:
            return
        self._reductions.gradient_ready(unit, parameter)
        if use.missing:
            return
        if unit.has_frozen:  # gradients of inputs may still need the frozen parameters
            self._reductions.complete(unit)
        else:
            self._finish(unit)

    def _count_inner(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Count a gradient of a backward that does not close units; free the unit when all have come."""
        if self._in_step and not self._closing:
            return
        inner = self._uses[unit].inner
        inner.add(parameter)
        if len(inner) == unit.num_trainable and not unit.has_frozen:
            inner.clear()
            self._set_aside(unit)

    def end_microbatch(self) -> None:
        for unit in reversed(self._units):
            self._finish(unit)
        self._reductions.end_microbatch()
        if not self._agreed:
            self._agree_on_order()
        self.calls.end_microbatch(last=self._last)
        self._views.refuse_others()

    def abandon_microbatch(self) -> None:
        """Free everything after an exception in the microbatch; launched reductions cannot be taken back."""
        self.calls.abandon_microbatch(reduced=self._reductions.abandon_microbatch())
        for unit in self._sharded:
            self._await_parameters(unit)
            if unit.residence is Residence.READY:
                self._free(unit, forget=True)
            elif unit.is_root:
                unit.vacate()  # it may have been let go
        self._uses = {unit: Use() for unit in self._units}

    # -- parameters: gathered ahead, freed, published ------------------------------------------

    def _make_ready(self, unit: Unit) -> None:
        if unit in self._sharded and unit not in self._demanded:
            self._gathers.record(unit)
            self._demanded.add(unit)
            self._gather(unit)
            for ahead in self._gathers.after(self._prefetch):
                if ahead.can_gather:
                    self._gather(ahead)
        self._await_parameters(unit)

    def _gather(self, unit: Unit) -> None:
        if unit.residence is not Residence.FREED:
            return  # it was gathered ahead
        if not unit.can_gather:
            self._make_room(unit)
        pending = unit.gather()
        if pending is not None:
            self._arriving[unit] = pending

    def _free(self, unit: Unit, *, forget: bool) -> None:
        self._demanded.discard(unit)
        unit.free(forget=forget)

    def _await_parameters(self, unit: Unit) -> None:
        pending = self._arriving.pop(unit, None)
        if pending is not None:
            pending.wait()
            unit.arrived()

    def await_published(self) -> None:
        """Wait until all parameters that rest replicated are there."""
        for unit in list(self._arriving):
            if unit not in self._sharded:
                self._await_parameters(unit)

    def _make_room(self, unit: Unit) -> None:
        """Evict a unit that was wrongly gathered ahead; where the tenant is in use, give `unit` memory of its own."""
        tenant = unit.pool_tenant
        assert isinstance(tenant, Unit)
        if tenant not in self._demanded:
            self._await_parameters(tenant)
            self._free(tenant, forget=False)
            return
        if self._reductions.is_complete(tenant) and not self._uses[tenant].running:
            self._set_aside(tenant)  # only frozen parameters kept the tenant gathered
            return
        if self._uses[unit].recomputed:
            raise RuntimeError(
                f"{unit} was recomputed for backward and {tenant} uses its memory now: set strategy.unit=model, or "
                "prefetch=1 or more"
            )
        # Recomputation always runs units inside the one whose backward asks for it, so it gets no warning.
        if _task() == NO_TASK:
            warnings.warn(f"{unit} runs inside {tenant}: it gets memory of its own", stacklevel=2)
        with self._views.moving(unit):
            unit.reside_in(Private(unit.full_bytes, self._device))
        self.saved.find_memory()
        self.num_private += 1

    def publish(self, unit: Unit) -> None:
        """Start O -> P after the optimizer's step; the next forward that needs the unit waits for it."""
        pending = unit.publish()
        if unit in self._sharded:
            unit.forget()
            if self._prefetch and unit in self._gathers.first(1 + self._prefetch):
                self._gather(unit)  # the next step begins with it
        elif pending is not None:
            self._arriving[unit] = pending
            unit.await_on_use(partial(self._await_parameters, unit))
            if not self._overlap:
                self._await_parameters(unit)

    # -- units that backward has passed --------------------------------------------------------

    def _finish(self, unit: Unit) -> None:
        self._reductions.complete(unit)
        self._uses[unit].closed = True
        self._set_aside(unit)  # a second backward may have gathered a closed unit again

    def _set_aside(self, unit: Unit) -> None:
        self._uses[unit].in_backward = False
        if unit not in self._sharded:
            return
        if unit.residence is Residence.READY:
            self._free(unit, forget=self._keep == "none" or unit.has_private_store)
        elif unit.is_root and unit.residence is Residence.FREED:
            unit.vacate()  # it may have been let go

    def _agree_on_order(self) -> None:
        """Agree on one order after the first microbatch, see `Reductions.agree`; without agreement do not prefetch."""
        self._agreed = True
        if not self._reductions.agree(self._gathers.order, any_order=not self._sharded):
            self._prefetch = 0

    # -- at rest -----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait for all that is in flight and free what was gathered ahead; what is kept for backward stays."""
        self._reductions.finish()
        for unit in list(self._arriving):
            self._await_parameters(unit)
        for unit in self._sharded - self._demanded:
            if unit.residence is Residence.READY:
                self._free(unit, forget=unit.has_private_store)


def _task() -> int:
    """Return autograd's task id of the backward that runs in this thread, or NO_TASK."""
    return torch._C._current_graph_task_id()
