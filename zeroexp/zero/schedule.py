"""When the moves of a step happen: events in a module become verbs of units.

    forward         block 0        block 1        block 2     |  backward           block 2        block 1
    compute         ######         ######         ######      |                     ######         ######
    all-gather        gather 1 ....  gather 2 ....            |        gather 2 ....  gather 1 ....
    reduce                                                    |                                    2a 2b .....

To close a unit is to reduce its gradients, missing ones as zeros, and to free it: this microbatch needs it no more.

With `overlap=False` the same moves happen in the same order and each is waited for at once: this readable twin is bit
for bit equal and shows what overlap buys. gathers.py gathers and frees. The events, by hooks (`attach`):

    forward-pre hook            the unit's parameters are needed
    forward hook                they are not needed until backward; each output tensor gets a hook
    hook on an output tensor    backward reaches the module (module backward hooks do not fire where the output is
                                no tuple of tensors, as at the root of a Hugging Face model); of modules that return
                                one tensor, as where a block is skipped, the last that ran is reached first
    post-accumulate hook        a parameter's gradient is complete

[Note: one order] All ranks issue the same moves in one order. So only what the program does starts one: a forward or
backward of a module begins, a microbatch ends, the engine is called. **No decision of one rank alone does**: which
gradients exist, how many references a tensor has, whether garbage was collected, how much time has passed. Reductions
keep the order that ranks agreed on in the first microbatch: a bucket that is complete early waits for its turn, and a
unit without gradients is closed once backward has passed it. Where a rank gathers alone, nothing but reductions is
ordered, so that a gradient may start one between two events. What one rank alone decides is how long bytes stay
(full_storage.py, [Note: one storage]).

[Note: when a unit is closed] Among the nodes that are ready, autograd runs the one created last. So when the gradient
of a module's output is about to be used, everything created after that output has run already: a unit whose first use
began after that module ended gets no further gradient and needs its parameters no more. Where block 0 was used from
tick 1 to 2 and block 1 from 3 to 4, the gradient of block 0's output closes block 1, since 3 > 2.

[Note: which backward] Only the backward that `Strategy.backward` runs closes units and starts reductions. Another
backward (`torch.autograd.grad`, a plain `loss.backward()`) gathers units where it needs them; the gradients it leaves
in the parameters are reduced at the end of the microbatch. A backward inside the closing one (reentrant checkpointing)
may come several times to one parameter: its gradients are not counted, and the unit is closed in one of the other ways.

[Note: release of the root] When backward reaches its first block (forward's last), the head has had its backward, and
of the root only the embedding's gradient is left. That needs no weights and comes when most memory is in use. So the
root is freed then, where a rank can gather alone: code of the root that one rank alone runs may need it again. It is
gathered again then, and stays in the microbatches that follow. Elsewhere it stays until the end, as in FSDP2.

[Note: weak references] Autograd keeps its hooks as long as the parameter or the graph, where the cycle collector does
not see them. A module that keeps its output in an attribute would so keep the engine, and all that it holds, for good.
So these hooks, and the places of saved_views.py, hold weak references to the engine.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroexp.comm.base import Pending
from zeroexp.comm.collectives import Collectives
from zeroexp.cut.bucket import Bucket
from zeroexp.zero.backward_task import LossBackward, current_task, has_ended
from zeroexp.zero.gathers import Gathers
from zeroexp.zero.gradients import uses_of_leaves
from zeroexp.zero.held import GatherState, unguarded
from zeroexp.zero.observer import Observer
from zeroexp.zero.options import Options
from zeroexp.zero.unit import Unit

What = TypeVar("What")


class Ticks(NamedTuple):
    """When a use of a module was, in ticks (events so far)."""

    began: int
    ended: int
    microbatch: int  # its number; 0: outside of one
    generation: int  # of the unit's weights


@dataclass
class UnitProgress:
    """How far one unit has come in this microbatch."""

    # Which of the unit's trainable parameters have no gradient yet, and how many by bucket.
    missing: set[int] = field(default_factory=set[int])
    missing_in: list[int] = field(default_factory=list[int])
    first_forward: int | None = None  # tick at which it began
    # Ticks at which forwards began that still run.
    open_forwards: list[int] = field(default_factory=list[int])
    forward_in_backward: int = 0  # tick at which the forward began whose backward runs
    closed: bool = False  # gradients are complete and parameters are needed no more
    num_launched: int = 0  # buckets whose reduction was launched


class Schedule:
    """The moves of one engine; its hooks call the methods of forward and backward."""

    def __init__(
        self,
        units: Sequence[Unit],
        wire: Collectives,
        options: Options,
        observer: Observer,
        *,
        scales_loss: bool,
    ):
        """scales_loss: gradients of any other backward than the engine's own, which scales, are refused."""
        self.in_microbatch = False
        self._scales_loss = scales_loss
        self._observer, self._wire = observer, wire
        self._root = units[0]  # the others follow in order of definition
        self.gathers = Gathers(units, options)
        # Units whose events matter. A rank that moves nothing (options.py, [Note: world of one]) needs none; by them a
        # loss that is not scaled is found.
        moves = bool(self.gathers.sharded) or any(unit.reduces for unit in units)
        self.watched = list(units) if moves or scales_loss else []
        self._keep = options.keep
        self._overlap = options.overlap
        # Whether a gather is of all ranks (NCCL, gloo), and no rank's own copy out of shared memory: reductions then
        # start only at events, see [Note: one order].
        self._gathers_together = bool(self.gathers.sharded) and not wire.traits.moves_on_wait
        of_units = (gradients for unit in units for gradients in unit.gradients)
        self._of_two_dtypes = [each for each in of_units if each.has_two_dtypes]
        self._progress = {unit: UnitProgress() for unit in units}
        # Used in this microbatch and not closed, in the order of their first forwards, or used again.
        self._open: dict[Unit, None] = {}
        self._in_backward: dict[Unit, None] = {}  # those of which a backward runs
        # Parameters that got no gradient in the previous microbatch.
        self._silent: dict[Unit, set[int]] = {unit: set() for unit in units}
        self._tick = 0
        self._num_running = 0  # forwards of modules that run now
        self._microbatch = 0  # number of microbatches so far
        self._last = False  # whether this microbatch is the last of its step
        self._agreed = False  # whether the ranks have compared their first microbatch
        self._closing = LossBackward()
        # Units gathered by another backward than the closing one, and autograd's task id of it.
        self._inner: dict[Unit, int] = {}
        # [Note: release of the root]
        self._root_released = self._root_needed_again = False
        # Comparisons of the ranks, which come once all ranks have launched their reductions.
        self.at_end_of_microbatch: list[Callable[[], None]] = []
        reducing = [unit for unit in units if unit.reduces]
        self._order = [*reversed(reducing[1:]), *reducing[:1]]  # of reductions
        self._next_to_reduce = 0  # index in the order of the unit whose buckets may be launched
        self._closed: list[Unit] = []  # units closed in this microbatch, in order
        self._reduces_each_microbatch = options.reduce_each == "microbatch"
        self._most_in_flight = wire.traits.reductions_in_flight if options.overlap else 0
        self._in_flight: deque[Pending] = deque()  # reductions
        # Those that an exception left in flight. gloo delivers no message of a peer past one whose receive was dropped:
        # the gathers that this rank still waits for would never arrive.
        self._lost: list[Pending] = []
        self.has_lost = False  # whether there were any, or sums behind them
        self._reduced = False  # whether any reduction of this microbatch was launched
        # By unit, the buckets that hold elements of each trainable parameter.
        self._buckets_of = {unit: unit.buckets_of_parameters() for unit in units}

    def attach(self, unit: Unit, module: nn.Module) -> None:
        """Have what happens to `module` and its unit's parameters reported.

        A copy of the module takes the hooks along, which then do nothing. The pre-hook comes first, since other
        pre-hooks compute with the weights (`weight_norm`). The compiler does not trace the two forward hooks.
        """
        weakly = weakref.ref(self), weakref.ref(unit)  # [Note: weak references]

        def before_forward(called: nn.Module, _args: Any) -> None:
            if called is module:
                self.before_forward(unit)

        def after_forward(called: nn.Module, _args: Any, output: Any) -> None:
            if called is not module:
                return
            ticks = self.after_forward(unit, differentiable=torch.is_grad_enabled())
            for tensor in tensors_in(output):
                self._observer.returned(unit, tensor)
                if tensor.requires_grad and not tensor.is_leaf:  # nothing came before a leaf
                    _call_first(tensor, partial(_report, Schedule.before_backward, *weakly, ticks))

        module.register_forward_pre_hook(_uncompiled(before_forward), prepend=True)
        module.register_forward_hook(_uncompiled(after_forward), always_call=True)
        for index, parameter in enumerate(unit.trainable_parameters):
            report = partial(_report, Schedule.gradient_ready, *weakly, index)
            parameter.register_post_accumulate_grad_hook(report)

    # -- forward ----------------------------------------------------------------------------------

    def begin_microbatch(self, *, last: bool) -> None:
        self.in_microbatch, self._last = True, last
        self._microbatch += 1
        self._tick = self._num_running = self._next_to_reduce = 0
        self._root_released = self._reduced = False
        self.at_end_of_microbatch, self._closed = [], []
        self._open.clear()
        self._in_backward.clear()
        self.gathers.begin_pass(in_microbatch=True)
        for unit in self.watched:
            self._silent[unit] = self._progress[unit].missing
            buckets_of, missing_in = self._buckets_of[unit], [0] * len(unit.buckets)
            for index in chain.from_iterable(buckets_of):
                missing_in[index] += 1
            self._progress[unit] = UnitProgress(set(range(len(buckets_of))), missing_in)

    def before_forward(self, unit: Unit) -> None:
        self._tick += 1
        if not self._num_running and not self.in_microbatch:
            self.gathers.begin_pass(in_microbatch=False)
        self._num_running += 1
        progress = self._progress[unit]
        if progress.first_forward is None:
            progress.first_forward = self._tick
            self._open.pop(unit, None)  # to the end
        progress.open_forwards.append(self._tick)
        self._open[unit] = None
        self._free_after_inner_backward()
        if not unit.is_pinned:
            self.gathers.make_ready(unit)

    def after_forward(self, unit: Unit, *, differentiable: bool) -> Ticks:
        """Return when this use began and ended, for `before_backward` of its outputs."""
        self._tick += 1
        progress = self._progress[unit]
        began = progress.open_forwards.pop()
        self._num_running -= 1
        kept = self._keep == "all" or (unit.is_root and self._keep == "last")
        if self._is_idle(unit) and unit not in self._in_backward and not (kept and differentiable):
            self.gathers.free(unit)
        number = self._microbatch if self.in_microbatch else 0
        return Ticks(began, self._tick, number, unit.generation)

    # -- backward ---------------------------------------------------------------------------------

    @contextmanager
    def closing_backward(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the loss whose backward, inside, closes units, see [Note: which backward]."""
        if not self.in_microbatch:
            raise _outside("backward", ": run forward and backward inside it")
        uses = uses_of_leaves(loss) if self._of_two_dtypes else {}
        for gradients in self._of_two_dtypes:
            gradients.use_compute_dtype(uses)
        with self._closing.of_loss(loss) as loss:
            yield loss

    def _use_reduce_dtype(self) -> None:
        for gradients in self._of_two_dtypes:
            gradients.use_reduce_dtype()

    def before_backward(self, unit: Unit, ticks: Ticks) -> None:
        """Close the units used later and gather `unit`, since the gradient of its output is about to be used."""
        began, ended, microbatch, generation = ticks
        has_changed = generation != unit.generation
        is_whole = unit.is_pinned or not unit.is_sharded
        if not (self.in_microbatch or microbatch or has_changed) and is_whole:
            return  # gradients are read, as by torch.autograd.grad
        if not self.in_microbatch or microbatch != self._microbatch:
            stepped = ", and a step has changed its weights since" if has_changed else ""
            raise RuntimeError(
                f"backward of {unit} outside of the microbatch in which its forward ran{stepped}: run forward and "
                "backward inside the same `with strategy.microbatch(last=...):`, of each engine that the loss goes "
                "through, or to read gradients alone inside the same `with strategy.gathered():`"
            )
        closes = self._closing.is_current()
        for other in self._first_used_after(ended):
            # A parameter that usually gets a gradient and has none yet may get it where no module tells of it.
            still_expected = self._progress[other].missing - self._silent[other]
            if closes and (self._gathers_together or not still_expected):
                self._close(other)
            else:
                self._after_backward(other)
        for other in [*self._in_backward]:
            # It was used twice: backward of the earlier use comes later.
            if self._progress[other].forward_in_backward > ended:
                self._after_backward(other)
        if closes and not unit.is_root:
            self._release_root()
        if not self._progress[unit].closed:
            self._progress[unit].forward_in_backward = began
            self.make_ready_for_backward(unit)

    def _first_used_after(self, ended: int) -> list[Unit]:
        """Return the open units whose first forward began after this tick, in the order of these.

        It looks at no other: at all units, once for each, a step of many would grow with the square of their number.
        """
        found: list[Unit] = []
        for unit in reversed(self._open):
            progress = self._progress[unit]
            if progress.first_forward is not None and progress.first_forward > ended:
                found.append(unit)
            elif progress.first_forward is not None and not progress.closed:
                break  # those that were opened before were used before
        return found[::-1]

    def make_ready_for_backward(self, unit: Unit) -> None:
        """Gather the unit if need be, also where no output told that backward reaches it, or reaches it again."""
        if not self.in_microbatch:
            raise _outside(f"backward of {unit}")
        self._in_backward[unit] = self._open[unit] = None
        if unit is self._root and self._root_released:
            self._root_needed_again = True
        if unit not in self.gathers.in_use and not self._closing.is_current():
            self._inner[unit] = current_task()
        self.gathers.make_ready(unit)

    def gradient_ready(self, unit: Unit, index: int) -> None:
        """One of the unit's trainable parameters got its gradient; the last one of a bucket starts its reduction."""
        progress = self._progress[unit]
        if not self.in_microbatch:
            raise _outside(f"{unit} got a gradient", ", where nobody reduces it")
        buckets = self._buckets_of[unit][index]
        # The first of its buckets goes first; where nothing is reduced yet, a later gradient is added to it.
        is_reduced = progress.closed or (self._reduced and buckets[0] < progress.num_launched)
        self._observer.gradient(unit, unit.trainable_parameters[index], is_reduced=is_reduced)
        if self._scales_loss and not self._closing.is_open:
            raise RuntimeError(
                f"{unit} got a gradient of a loss that is not scaled: with scales_loss=True call "
                "strategy.backward(loss), not loss.backward()"
            )
        if not self._closing.is_current():
            return
        if index not in progress.missing:  # of a backward before
            return
        progress.missing.discard(index)
        if self._gathers_together:
            return
        for bucket in buckets:
            progress.missing_in[bucket] -= 1
        # Gradients of inputs may still need frozen parameters.
        if not progress.missing and len(unit.trainable) == len(unit.held):
            self._close(unit)
        else:
            self._launch()

    def end_microbatch(self) -> None:
        for unit in reversed(self.watched):
            self._close(unit)
        self._inner.clear()
        self._refuse_unreduced()
        if self._last or not self._overlap:
            self.finish_reductions()
        for compare in self.at_end_of_microbatch:
            compare()
        if not self._agreed:
            self._agree()
        self.gathers.end_microbatch()
        self._use_reduce_dtype()
        self.in_microbatch = False
        self._observer.end_microbatch(last=self._last)

    def abandon_microbatch(self) -> None:
        """Free everything after an exception in the microbatch; launched reductions cannot be taken back."""
        self.in_microbatch = False
        self._observer.abandon_microbatch(reduced=self._abandon_reductions())
        self._use_reduce_dtype()
        self.gathers.abandon_microbatch()
        self._progress = {unit: UnitProgress() for unit in self._progress}
        self._inner.clear()
        self._in_backward.clear()
        self._num_running = 0

    # -- after the step ---------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for all that is in flight. Nothing is issued or freed, so that one rank alone may wait."""
        self.finish_reductions()
        self.gathers.wait()

    def wait_for_weights(self) -> None:
        """Wait for what changes weights and moments, not for gathers ahead, whose peers may have ended meanwhile."""
        self.finish_reductions()
        self.gathers.await_published()

    def drain_collectives(self) -> None:
        """Wait for all that is in flight, and free what was gathered ahead; what is kept for backward stays.

        All ranks call it together: what is freed has to be gathered again.
        """
        self.finish_reductions()
        self.gathers.wait_and_free_ahead()

    # -- how units are closed and freed -----------------------------------------------------------

    def _close(self, unit: Unit) -> None:
        """Close the unit; one that is closed already may have been gathered again by a second backward."""
        progress = self._progress[unit]
        was_closed, progress.closed = progress.closed, True
        # Its weights go before the message of its gradients is made.
        self._after_backward(unit)
        self._open.pop(unit, None)
        if not was_closed:
            self._closed.append(unit)
            self._launch()

    def _after_backward(self, unit: Unit) -> None:
        self._in_backward.pop(unit, None)
        self.gathers.free(unit)

    def _release_root(self) -> None:
        """Free the root until it is used, see [Note: release of the root]."""
        if self._gathers_together or self._keep == "all" or self._root_needed_again:
            return
        if self._root_released or not self._is_idle(self._root) or self._root.is_pinned:
            return
        self._root_released = True
        self._after_backward(self._root)
        self.announce_release()

    def announce_release(self) -> None:
        """Tell the observer that a use of the root gathers it again, where it is released."""
        released = self.in_microbatch and self._root_released
        if released and self._root.gather_state is GatherState.FREED:
            self._observer.released(self._root, partial(self.make_ready_for_backward, self._root))

    def _free_after_inner_backward(self) -> None:
        """Free what was gathered by a backward that ran inside the closing one, or before it, and has ended."""
        if self._gathers_together and not self._closing.is_open:
            return
        for unit, task in list(self._inner.items()):
            if has_ended(task):
                del self._inner[unit]
                if not self._progress[unit].open_forwards:
                    self._after_backward(unit)

    def _is_idle(self, unit: Unit) -> bool:
        """Tell whether the unit is gathered for use and none of its forwards runs."""
        in_use = unit in self.gathers.in_use and unit.gather_state is GatherState.READY
        return in_use and not self._progress[unit].open_forwards

    # -- how reductions start ---------------------------------------------------------------------

    def _launch(self) -> None:
        """Launch every bucket that has its gradients and whose predecessors were launched, see [Note: one order]."""
        while self._next_to_reduce < len(self._order):
            unit = self._order[self._next_to_reduce]
            progress = self._progress[unit]
            for index in range(progress.num_launched, len(unit.buckets)):
                if progress.missing_in[index] and not progress.closed:
                    return
                progress.num_launched += 1
                self._start_reduction(unit, unit.buckets[index])
            if not progress.closed:
                return
            self._next_to_reduce += 1

    def _start_reduction(self, unit: Unit, bucket: Bucket) -> None:
        """Start the bucket's reduce-scatter or all-reduce, and wait for the oldest where too many are in flight."""
        if not (self._last or self._reduces_each_microbatch):
            return
        if self._wire.traits.is_collective:
            self._await_all_but(0)  # messages of before make room for this one, as with FSDP2
        self._reduced = True  # also if it fails here: peers may have launched it, and parts of it may be counted
        self._in_flight.append(unit.reduce(bucket, last=self._last))
        self._await_all_but(self._most_in_flight)

    def _await_all_but(self, most: int) -> None:
        while len(self._in_flight) > most:
            self._in_flight.popleft().wait()

    def finish_reductions(self) -> None:
        """Wait for the reductions in flight, and for sums between replicas; nothing is issued."""
        self._await_all_but(0)
        self._wire.finish_sums()

    def _refuse_unreduced(self) -> None:
        """Tell the observer of gradients that came, however, behind the reductions of this microbatch."""
        if not self._reduced:
            return
        with unguarded():
            late = [
                (unit, parameter)
                for unit in self._order
                for parameter in unit.trainable_parameters
                if parameter.grad is not None
            ]
        for unit, parameter in late:
            self._observer.gradient(unit, parameter, is_reduced=True)

    def _abandon_reductions(self) -> bool:
        """Forget the microbatch; return whether reductions are lost, because it had launched some of its own.

        Reductions of earlier microbatches are finished: the other ranks have launched them too, or are about to, and
        wait for this rank to take its part.
        """
        lost = self._reduced
        try:
            if not lost:
                self.finish_reductions()
        except Exception:
            # A peer is gone; the exception that ended the microbatch is the one to raise.
            lost = True
        finally:
            self._lost += self._in_flight
            self._in_flight.clear()
            self.has_lost |= lost
        return lost

    def _agree(self) -> None:
        """Adopt the order of reductions of the first microbatch, if ranks gathered and closed units in one order.

        Any such order will do: ranks whose gradients differ later launch at the same events. Without agreement nothing
        is gathered ahead.
        """
        self._agreed = True
        closed = [unit for unit in self._closed if unit.reduces]
        names = [unit.name for unit in (*closed, *self.gathers.order_of_microbatch.units)]
        if self._wire.same_everywhere(names, "the end of the first microbatch"):
            self._order = closed
        else:
            self.gathers.depth = 0


def _call_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register a hook that backward calls before those that the tensor has already.

    A module that returns its input shares it with the module before, which backward enters later.
    """
    earlier = {**(tensor._backward_hooks or {})}
    tensor.register_hook(hook)
    if earlier:
        hooks: Any = tensor._backward_hooks
        for number, each in earlier.items():  # torch calls them in order of insertion
            del hooks[number]
            hooks[number] = each


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile calls without tracing it."""
    return torch.compiler.disable(hook)  # pyright: ignore[reportReturnType]


def _report(
    event: Callable[[Schedule, Unit, What], None],
    schedule: weakref.ref[Schedule],
    unit: weakref.ref[Unit],
    what: What,
    _tensor: Tensor,
) -> None:
    """Report an event of backward to the schedule, see [Note: weak references]."""
    engine, its = schedule(), unit()
    if engine is not None and its is not None:
        event(engine, its, what)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, in containers that pytree knows, as those of Hugging Face are.

    For a tensor that it does not find the gather starts later, when autograd asks for what it saved.
    """
    return (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


def _outside(what: str, why: str = "") -> RuntimeError:
    return RuntimeError(f"{what} outside of `with strategy.microbatch(last=...):`{why}")
