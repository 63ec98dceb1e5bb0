"""Parameters that rest sharded are gathered when they are needed, and ahead; they are freed when they are not.

    compute         block 0        block 1        block 2
    all-gather        gather 1 ....  gather 2 ....  gather 3 ...

The order of gathers repeats itself, microbatch after microbatch: the first one records it, and units are gathered ahead
in it. A wrong guess costs a gather and never a wrong result: the unit is freed when the microbatch ends.

[Note: two orders] Forwards outside of microbatches, as validation's, have an order of their own. In one order with
microbatches their gathers would follow the last backward, and each microbatch would end by gathering the root in vain.

[Note: counted operators] A selective checkpoint counts the operators of its block in forward, and expects the same ones
when it recomputes. A block that uses a weight of the root, which may be released (schedule.py), has it gathered again
there: that happens outside of torch's count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch._C._functorch import TransformType, get_interpreter_stack
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode

from zeroexp.zero.backward_task import NO_TASK, current_task
from zeroexp.zero.held import GatherState
from zeroexp.zero.options import Options
from zeroexp.zero.unit import Unit


class GatherOrder:
    """The order of gathers that the following microbatches are expected to repeat."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        # Index of the first unit that backward needed: forward gathers none ahead from there on, since these would lie
        # beside the logits.
        self._backward_from: int | None = None
        self._position = 0
        self._guess_failed = False

    def rewind(self) -> None:
        if self._guess_failed:
            self.units, self._backward_from = [], None
        self._position = 0
        self._guess_failed = False

    def record(self, unit: Unit) -> None:
        """Record that `unit` is needed now. An unexpected unit ends guessing, and the next microbatch records anew."""
        if self._guess_failed:
            return
        if current_task() != NO_TASK and self._backward_from is None:
            self._backward_from = self._position
        if self._position == len(self.units):
            self.units.append(unit)
        if self.units[self._position] is unit:
            self._position += 1
        else:
            self._guess_failed = True

    def units_after(self, depth: int) -> list[Unit]:
        stop = self._position + depth
        if self._backward_from is not None and self._position <= self._backward_from:
            stop = min(stop, self._backward_from)
        return [] if self._guess_failed else self.units[self._position : stop]

    def first_units(self, depth: int) -> list[Unit]:
        return [] if self._guess_failed else self.units[:depth]


class Gathers:
    """The gathers of the units of one engine."""

    def __init__(self, units: Sequence[Unit], options: Options):
        """Gather as many units ahead as options say; without `overlap` wait for each move at once."""
        self.sharded = [unit for unit in units if unit.is_sharded]
        self.in_use: set[Unit] = set()  # sharded units whose parameters are in use
        # [Note: two orders]
        self.order_of_microbatch, self._order_outside = GatherOrder(), GatherOrder()
        self._order = self._order_outside
        self.depth = options.prefetch or 0
        self._replicated = [unit for unit in units if not unit.is_sharded]
        self._published: deque[Unit] = deque()  # whose masters may be on their way
        self._overlap = options.overlap
        self._leaves_published = options.publish == "forward"
        # Each message of these may be a copy of its unit.
        self._most_published = len(units) if self._leaves_published else 2

    def begin_pass(self, *, in_microbatch: bool) -> None:
        """Expect the gathers of the last microbatch again, or of the last forward outside of one."""
        self._order = self.order_of_microbatch if in_microbatch else self._order_outside
        self._order.rewind()

    def end_microbatch(self) -> None:
        self._order = self._order_outside
        self._free_unused()

    def make_ready(self, unit: Unit) -> None:
        """Return when the unit's parameters can be used; they stay until the unit is freed."""
        with _uncounted():
            if unit.is_sharded and unit not in self.in_use:
                self._order.record(unit)
                self._gather(unit)
                self.in_use.add(unit)
                for ahead in self._order.units_after(self.depth):
                    self._gather(ahead)
            unit.arrive()

    def free(self, unit: Unit) -> None:
        """Free the unit if it is in use."""
        if unit in self.in_use:
            self.in_use.remove(unit)
            unit.free()

    def abandon_microbatch(self) -> None:
        """Free everything after an exception."""
        self.in_use.clear()
        self._free_unused()

    def publish(self, unit: Unit, *, ahead: bool = True) -> None:
        """Start O -> P after the optimizer's step. `ahead`: units of the next step may be gathered already.

        What a forward outside of microbatches has kept for a backward shows the weights of before: it is freed, and
        that backward raises.
        """
        if not unit.publishes:
            return
        self.free(unit)
        unit.publish()
        if not unit.is_sharded:
            self._published.append(unit)
        while len(self._published) > (self._most_published if self._overlap else 0):
            self._published.popleft().arrive()
        if ahead and self.depth and unit in self.order_of_microbatch.first_units(1 + self.depth):
            self._gather(unit)

    def leave_published(self, *, await_all: bool = False) -> list[Unit]:
        """Return the units whose weights are on their way when a step ends, for whoever uses them to wait.

        Code in C++ (scripted, traced) is seen by no guard and may read such weights, so that there are none by default.
        """
        if await_all or not self._leaves_published:
            self.await_published()
        left = [unit for unit in self._published if unit.gather_state is GatherState.GATHERING]
        for unit in left:
            unit.is_awaited = True
        self._published.clear()
        return left

    def await_published(self) -> None:
        """Return when all parameters that rest replicated are there."""
        self._published.clear()
        for unit in self._replicated:
            unit.arrive()

    def wait(self) -> None:
        """Return when nothing is in flight; what was gathered ahead stays for its use."""
        self.await_published()
        for unit in self.sharded:
            unit.wait()

    def wait_and_free_ahead(self) -> None:
        """Return when nothing is in flight and nothing is gathered ahead; what is in use stays."""
        self.wait()
        self._free_unused()

    def _free_unused(self) -> None:
        """Free what was gathered ahead; what is in use stays."""
        for unit in self.sharded:
            if unit not in self.in_use:
                unit.free()

    def _gather(self, unit: Unit) -> None:
        if unit.gather_state is GatherState.FREED:  # else it was gathered ahead
            _refuse_in_transform(unit)
            unit.gather()
            if not self._overlap:
                unit.arrive()


def _uncounted() -> AbstractContextManager[object]:
    """Operators inside are none of a block's that is recomputed, see [Note: counted operators]."""
    counts = isinstance(_get_current_dispatch_mode(), _CachedTorchDispatchMode)
    return _pop_mode_temporarily() if counts else nullcontext()


def _refuse_in_transform(unit: Unit) -> None:
    """Raise RuntimeError inside of a transform that differentiates, which would wrap what is gathered."""
    levels = get_interpreter_stack() or []
    if any(level.key() != TransformType.Vmap for level in levels):
        raise RuntimeError(
            f"{unit} is freed, and a transform of torch.func (grad, vjp, jvp, jacrev) uses it: put `with "
            "strategy.gathered():` around the transform, outside of a microbatch, or use zero2"
        )
