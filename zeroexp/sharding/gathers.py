"""Parameters that rest sharded are gathered when they are needed and freed when they are not: nothing is ahead here.

prefetch.py adds what is gathered ahead and what stays in flight; with `overlap=False` this file is all there is.

[Note: two orders] Forwards outside of microbatches, as validation's, have an order of their own. In that of
microbatches they would follow the last backward, and every further step would gather the root in vain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

from zeroexp.comm.base import Pending
from zeroexp.sharding.gather_order import GatherOrder
from zeroexp.sharding.state import Residence
from zeroexp.sharding.unit import Unit

NO_TASK = -1  # autograd's task id where no backward runs


@dataclass(frozen=True)
class Eviction:
    """An eviction tells what the schedule does for a unit whose memory another unit uses."""

    # Free the tenant if backward has passed it; tell whether it was.
    release: Callable[[Unit], bool]
    give_own_memory: Callable[[Unit], None]


class Gathers:
    """This object gathers and frees the units of one engine, each when it is needed."""

    def __init__(self, units: Sequence[Unit], *, keep: str, eviction: Eviction):
        """`keep` says which units stay gathered between forward and backward: none | last (the root) | all."""
        self.sharded = {unit for unit in units if unit.is_sharded}
        self.in_use: set[Unit] = set()  # sharded units whose parameters are in use
        # [Note: two orders]
        self.order_of_microbatch, self._order_outside = GatherOrder(), GatherOrder()
        self.order = self._order_outside
        self.depth = 0  # units gathered ahead
        self._keep = keep
        self._eviction = eviction
        # Units of whose memory autograd holds views, see saved.py [Note: raw views].
        self._recomputed: set[Unit] = set()

    def begin_microbatch(self) -> None:
        self.order = self.order_of_microbatch
        self.order.rewind()
        self._recomputed = set()

    def end_microbatch(self) -> None:
        self.order = self._order_outside

    def begin_forward_outside(self) -> None:
        """Expect the gathers of the last forward outside of microbatches again."""
        self._order_outside.rewind()

    def make_ready(self, unit: Unit) -> None:
        """Return when the unit's parameters can be used; they stay until the unit is freed."""
        if unit in self.sharded and unit not in self.in_use:
            self.order.record(unit)
            self.in_use.add(unit)
            self._gather(unit)

    def after_forward(self, unit: Unit, *, differentiable: bool) -> None:
        """Free the unit unless it is kept for the backward that comes if the forward was differentiable."""
        kept = self._keep == "all" or (unit.is_root and self._keep == "last")
        if not (kept and differentiable):
            forget = not differentiable or self._keep == "none" or unit.has_private_store
            self.free(unit, forget=forget)

    def after_backward(self, unit: Unit) -> None:
        """Free the unit if it is gathered; a root that was let go shows no memory from here on."""
        if unit not in self.sharded:
            return
        if unit.residence is Residence.READY:
            self.free(unit, forget=self._keep == "none" or unit.has_private_store)
        elif unit.is_root and unit.residence is Residence.FREED:
            unit.show()

    def free(self, unit: Unit, *, forget: bool) -> None:
        self.in_use.discard(unit)
        unit.free(forget=forget)

    def may_free_until_used(self, root: Unit) -> bool:
        return self._keep != "all" and root in self.in_use and bool(root.chunks)

    def free_until_used(self, root: Unit, gather_again: Callable[[], None]) -> None:
        self.in_use.discard(root)
        root.free_until_used(gather_again)

    def abandon_microbatch(self) -> None:
        """Free everything after an exception."""
        for unit in self.sharded:
            if unit.residence is Residence.READY:
                self.free(unit, forget=True)
            elif unit.is_root:
                unit.show()  # it may have been let go

    def publish(self, unit: Unit, *, ahead: bool = True) -> None:
        """Carry out O -> P after the optimizer's step. `ahead`: units of the next step may be gathered already."""
        pending = unit.publish()
        if unit in self.sharded:
            unit.forget()
        elif pending is not None:
            self._started(unit, pending)

    def await_published(self) -> None:
        """Return when all parameters that rest replicated are there."""

    def wait(self) -> None:
        """Return when nothing is in flight; what was gathered ahead stays for its use."""

    def drain(self) -> None:
        """Return when nothing is in flight and nothing is gathered ahead; what is in use stays."""

    def note_recomputed(self, unit: Unit) -> None:
        """Note that autograd holds views of the memory in which the unit lies now, until the microbatch ends."""
        self._recomputed.add(unit)

    def _gather(self, unit: Unit) -> None:
        if not unit.can_gather:
            self._evict_tenant(unit)
        _refuse_in_transform(unit)
        pending = unit.gather()
        if pending is not None:
            self._started(unit, pending)

    def _started(self, unit: Unit, pending: Pending) -> None:
        pending.wait()
        unit.show_gathered()

    def _evict_tenant(self, unit: Unit) -> None:
        """Release the tenant of the unit's memory if it can be; else give `unit` memory of its own."""
        assert unit.store is not None
        tenant = unit.store.tenant
        assert isinstance(tenant, Unit)
        if self._eviction.release(tenant):
            return
        if unit in self._recomputed:
            raise RuntimeError(
                f"{unit} was recomputed for backward and {tenant} uses its memory now: set strategy.unit=model, or "
                "prefetch=1 or more"
            )
        # Recomputation always runs units inside the one whose backward asks for it, so it gets no warning.
        if current_task() == NO_TASK:
            warnings.warn(f"{unit} runs inside {tenant}: it gets memory of its own", stacklevel=2)
        self._eviction.give_own_memory(unit)


def current_task() -> int:
    """Return autograd's task id of the backward that runs in this thread, or NO_TASK."""
    return torch._C._current_graph_task_id()


def _refuse_in_transform(unit: Unit) -> None:
    """Raise RuntimeError inside of a transform that differentiates, which would wrap what is gathered."""
    levels = get_interpreter_stack() or []
    if any(level.key() != TransformType.Vmap for level in levels):
        raise RuntimeError(
            f"{unit} is freed, and a transform of torch.func (grad, vjp, jvp, jacrev) uses it: put `with "
            "strategy.gathered():` around the transform, outside of a microbatch, or use zero2"
        )
