"""Parameters that rest sharded are gathered when they are needed, and ahead; they are freed when they are not.

    compute         block 0        block 1        block 2
    all-gather        gather 1 ....  gather 2 ....  gather 3 ...

Units are gathered ahead in the order in which the first microbatch gathered them (gather_order.py). A wrong guess
costs a gather and never a wrong result: the unit is freed when the microbatch ends.

[Note: two orders] Forwards outside of microbatches, as validation's, have an order of their own. In that of
microbatches they would follow the last backward, and every further step would gather the root in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

from zeroexp.sharding.gather_order import GatherOrder
from zeroexp.sharding.state import Residence
from zeroexp.sharding.unit import Unit

NO_TASK = -1  # autograd's task id where no backward runs


class Gathers:
    """The gathers of the units of one engine."""

    def __init__(self, units: Sequence[Unit], *, keep: str, depth: int, overlap: bool):
        """Gather `depth` units ahead; without `overlap` wait for each move at once.

        keep: none | last (the root) | all: the units that stay gathered between forward and backward.
        """
        self.sharded = {unit for unit in units if unit.is_sharded}
        self.in_use: set[Unit] = set()  # sharded units whose parameters are in use
        # [Note: two orders]
        self.order_of_microbatch, self._order_outside = GatherOrder(), GatherOrder()
        self.order = self._order_outside
        self.depth = depth
        self._units = list(units)
        self._keep = keep
        self._overlap = overlap

    def begin_microbatch(self) -> None:
        self.order = self.order_of_microbatch
        self.order.rewind()

    def end_microbatch(self) -> None:
        self.order = self._order_outside
        self.free_unused()

    def begin_forward_outside(self) -> None:
        """Expect the gathers of the last forward outside of microbatches again."""
        self._order_outside.rewind()

    def make_ready(self, unit: Unit) -> None:
        """Return when the unit's parameters can be used; they stay until the unit is freed."""
        if unit in self.sharded and unit not in self.in_use:
            self.order.record(unit, in_backward=current_task() != NO_TASK)
            self.in_use.add(unit)
            self._gather(unit)
            for ahead in self.order.units_after(self.depth):
                self._gather(ahead)
        unit.arrive()

    def after_forward(self, unit: Unit, *, differentiable: bool) -> None:
        """Free the unit unless it is kept for the backward that comes if the forward was differentiable."""
        kept = self._keep == "all" or (unit.is_root and self._keep == "last")
        if not (kept and differentiable):
            self.free(unit)

    def after_backward(self, unit: Unit) -> None:
        """Free the unit if it is in use; a root that was let go raises from here on."""
        if unit in self.in_use:
            self.free(unit)
        elif unit.is_root and unit.residence is Residence.FREED:
            unit.show()

    def free(self, unit: Unit) -> None:
        self.in_use.discard(unit)
        unit.free()

    def may_free_until_used(self, root: Unit) -> bool:
        return self._keep != "all" and root in self.in_use

    def free_until_used(self, root: Unit, gather_again: Callable[[], None]) -> None:
        self.in_use.discard(root)
        root.free_until_used(gather_again)

    def abandon_microbatch(self) -> None:
        """Free everything after an exception."""
        for unit in self.sharded:
            self.free(unit)

    def publish(self, unit: Unit, *, ahead: bool = True) -> None:
        """Start O -> P after the optimizer's step. `ahead`: units of the next step may be gathered already."""
        unit.publish()
        if not self._overlap:
            unit.arrive()
        if ahead and self.depth and unit in self.order_of_microbatch.first_units(1 + self.depth):
            self._gather(unit)

    def await_published(self) -> None:
        """Return when all parameters that rest replicated are there."""
        for unit in self._units:
            if unit not in self.sharded:
                unit.arrive()

    def wait(self) -> None:
        """Return when nothing is in flight; what was gathered ahead stays for its use."""
        self.await_published()
        for unit in self.sharded:
            unit.wait()

    def free_unused(self) -> None:
        """Free what was gathered ahead; what is in use stays."""
        for unit in self._units:
            if unit in self.sharded and unit not in self.in_use:
                unit.free()

    def drain(self) -> None:
        """Return when nothing is in flight and nothing is gathered ahead; what is in use stays."""
        self.wait()
        self.free_unused()

    def _gather(self, unit: Unit) -> None:
        if unit.residence is Residence.FREED:  # else it was gathered ahead
            _refuse_in_transform(unit)
            unit.gather()
            if not self._overlap:
                unit.arrive()


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
