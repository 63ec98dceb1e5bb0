"""The schedule decides when the moves of a step happen: it turns events in a module into verbs of units.

    forward         block 0        block 1        block 2     |  backward     block 2        block 1
    compute         ######         ######         ######      |               ######         ######
    all-gather        gather 1 ....  gather 2 ....            |                 gather 1 ....
    reduce                                                    |                              reduce 2 ....

With `overlap=False` the same moves happen in the same order and each is waited for at once: this readable twin is bit
for bit equal and shows what overlap buys. gathers.py gathers and frees, and reductions.py decides in
which order reductions start.

[Note: when a unit is closed] Among the nodes that are ready, autograd runs the one created last. So when the gradient
of a module's output is about to be used, everything created after that output has run already: a unit whose first use
began after that module ended gets no further gradient and needs its parameters no more.

[Note: in step] Where every rank takes part in a gather (over messages, and in the backend's own collectives), all
ranks must issue gathers and reductions in one order. So only what the program does decides there which collectives a
rank issues and when: a forward or backward of a module that begins, the end of a microbatch, a call of the engine. No
decision of one rank alone may: which parameters have a gradient, how many references a tensor has, whether garbage was
collected, how much time has passed. A unit is freed and reduced when a module's backward begins, or at the end, and
never when its last gradient comes; and the root, of which only reference counts tell whether something to come still
needs it, stays gathered until the end of the microbatch, as in FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroexp.comm.collectives import Collectives
from zeroexp.sharding.closing import ClosingBackward
from zeroexp.sharding.gathers import Gathers, current_task
from zeroexp.sharding.observer import Observer
from zeroexp.sharding.options import Options, SettledOptions
from zeroexp.sharding.reductions import Reductions
from zeroexp.sharding.saved import SavedWeights
from zeroexp.sharding.state import Residence
from zeroexp.sharding.unit import Unit

# The ticks (hooks run so far) at which a use of a module began and ended, and the number of its microbatch.
Ticks = tuple[int, int, int]


@dataclass
class UnitProgress:
    """This record tells how far a unit has come in this microbatch."""

    first: int | None = None  # tick at which the unit's first forward began
    running: list[int] = field(default_factory=list)  # ticks at which forwards began that still run
    in_backward: bool = False
    began: int = 0  # tick at which the forward began whose backward runs
    # Parameters that have no gradient yet.
    missing: set[nn.Parameter] = field(default_factory=set[nn.Parameter])
    closed: bool = False  # gradients are complete and parameters are needed no more


class Schedule:
    """The schedule turns what happens in a pass into moves of units; hooks call its methods."""

    def __init__(
        self,
        units: Sequence[Unit],
        wire: Collectives,
        options: Options,
        settled: SettledOptions,
        observer: Observer,
    ):
        self.in_microbatch = False
        self._observer = observer
        self._units = list(units)  # the root first, then in order of definition
        self._uses = {unit: UnitProgress() for unit in units}
        self._tick = 0
        self._num_running = 0  # forwards of modules that run now
        self._microbatch = 0  # number of microbatches so far
        self._last = False  # whether this microbatch is the last of its step
        # Parameters that got no gradient in the previous microbatch.
        self._silent: dict[Unit, set[nn.Parameter]] = {unit: set() for unit in units}
        self.gathers = Gathers(
            units, keep=options.keep, depth=settled.prefetch, overlap=options.overlap
        )
        self._reductions = Reductions(
            units, wire, overlap=options.overlap, reduce_each=settled.reduce_each
        )
        # Where a gather needs all ranks, reductions start only at fixed places between gathers, see [Note: in step].
        self._in_step = bool(self.gathers.sharded) and not wire.facts.moves_on_wait
        self._agreed = False
        self._closing = ClosingBackward()
        # Units gathered by another backward than the closing one, and autograd's task id of it.
        self._inner: dict[Unit, int] = {}
        # Comparisons of the ranks, which come once all ranks have launched their reductions.
        self.at_end_of_microbatch: list[Callable[[], None]] = []
        self.saved = SavedWeights(self.gathers.sharded, self._make_ready_for_backward)

    # -- forward ----------------------------------------------------------------------------------

    def begin_microbatch(self, *, last: bool) -> None:
        self.in_microbatch = True
        self._last = last
        self._microbatch += 1
        self._tick = self._num_running = 0
        self.at_end_of_microbatch = []
        self.gathers.begin_microbatch()
        self._reductions.begin_microbatch(last=last)
        for unit in self._units:
            self._silent[unit] = self._uses[unit].missing
            self._uses[unit] = UnitProgress(missing=set(unit.trainable_parameters()))

    def before_forward(self, unit: Unit) -> None:
        self._tick += 1
        if not self._num_running and not self.in_microbatch:
            self.gathers.begin_forward_outside()
        self._num_running += 1
        use = self._uses[unit]
        use.first = use.first if use.first is not None else self._tick
        use.running.append(self._tick)
        self._free_after_inner_backward()
        if not unit.is_pinned:
            self.gathers.make_ready(unit)

    def after_forward(self, unit: Unit, *, differentiable: bool) -> Ticks:
        """Return when this use began and ended, for `before_backward` of its outputs."""
        self._tick += 1
        use = self._uses[unit]
        began = use.running.pop()
        self._num_running -= 1
        if self._is_idle(unit) and not use.in_backward:
            self.gathers.after_forward(unit, differentiable=differentiable)
        return began, self._tick, self._microbatch if self.in_microbatch else 0

    def watch_what_is_saved(self) -> AbstractContextManager[None]:
        """Return a context in which autograd saves gathered parameters so that backward finds them, see saved.py."""
        if not self.gathers.sharded:
            return nullcontext()
        return saved_tensors_hooks(self.saved.pack, self.saved.unpack)

    # -- backward ---------------------------------------------------------------------------------

    def closing_backward(self, loss: Tensor) -> AbstractContextManager[None]:
        """Let the backward of `loss` that runs inside close units, see closing.py."""
        self._expect_microbatch("backward", ": run forward and backward inside it")
        return self._closing.of_loss(loss)

    def before_backward(self, unit: Unit, ticks: Ticks) -> None:
        """Close the units used later and gather `unit`, since the gradient of its output is about to be used."""
        began, ended, microbatch = ticks
        if not self.in_microbatch or microbatch != self._microbatch:
            raise RuntimeError(
                f"backward of {unit} outside of the microbatch in which its forward ran: run forward and backward "
                "inside the same `with strategy.microbatch(last=...):`"
            )
        closes = self._closing.is_current()
        for other, use in self._uses.items():
            if use.first is not None and use.first > ended:
                # A parameter that usually gets a gradient and has none yet may get it where no module tells of it.
                if closes and (self._in_step or use.missing <= self._silent[other]):
                    self._close(other)
                else:
                    self._after_backward(other)
            elif use.in_backward and use.began > ended:
                # It was used twice: backward of the earlier use comes later.
                self._after_backward(other)
        if closes and not unit.is_root and not self._in_step:
            self._let_root_go()
        if not self._uses[unit].closed:
            self._uses[unit].began = began
            self._make_ready_for_backward(unit)

    def gradient_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        use = self._uses[unit]
        self._expect_microbatch(f"{unit} got a gradient", ", where nobody reduces it")
        self._observer.gradient(unit, is_reduced=self._reductions.is_complete(unit))
        if not self._closing.is_current():
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
            self._close(unit)

    def end_microbatch(self) -> None:
        for unit in reversed(self._units):
            self._close(unit)
        self._inner.clear()
        self._reductions.end_microbatch()
        for compare in self.at_end_of_microbatch:
            compare()
        if not self._agreed:
            self._agree_on_order()
        self.gathers.end_microbatch()
        self.in_microbatch = False
        self._observer.end_microbatch(last=self._last)

    def abandon_microbatch(self) -> None:
        """Free everything after an exception in the microbatch; launched reductions cannot be taken back."""
        self.in_microbatch = False
        self._observer.abandon_microbatch(reduced=self._reductions.abandon_microbatch())
        self.gathers.abandon_microbatch()
        self._uses = {unit: UnitProgress() for unit in self._units}
        self._inner.clear()
        self._num_running = 0

    # -- after the step ---------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for all that is in flight. Nothing is issued or freed, so that one rank alone may wait."""
        self._reductions.finish()
        self.gathers.wait()

    def drain(self) -> None:
        """Wait for all that is in flight and free what was gathered ahead; what is kept for backward stays.

        All ranks call it together: what is freed has to be gathered again.
        """
        self._reductions.finish()
        self.gathers.drain()

    # -- how --------------------------------------------------------------------------------------

    def _close(self, unit: Unit) -> None:
        """Reduce what the unit has of gradients and free it: this microbatch needs it no more."""
        self._reductions.complete(unit)
        self._uses[unit].closed = True
        self._after_backward(unit)  # a second backward may have gathered a closed unit again

    def _after_backward(self, unit: Unit) -> None:
        self._uses[unit].in_backward = False
        self.gathers.after_backward(unit)

    def _make_ready_for_backward(self, unit: Unit) -> None:
        """Gather the unit if need be, also where no output told that backward reaches it, or reaches it again."""
        self._expect_microbatch(f"backward of {unit}")
        self._uses[unit].in_backward = True
        if unit not in self.gathers.in_use and not self._closing.is_current():
            self._inner[unit] = current_task()
        self.gathers.make_ready(unit)

    def _expect_microbatch(self, what: str, why: str = "") -> None:
        if not self.in_microbatch:
            raise RuntimeError(f"{what} outside of `with strategy.microbatch(last=...):`{why}")

    def _is_idle(self, unit: Unit) -> bool:
        """Tell whether the unit is gathered for use and none of its forwards runs."""
        in_use = unit in self.gathers.in_use and unit.residence is Residence.READY
        return in_use and not self._uses[unit].running

    def _let_root_go(self) -> None:
        """Free the root once the head has had its backward, if nothing that is still to come has saved its weights.

        The embedding's gradient comes last, when most memory is in use, and needs no weights.
        """
        root = self._units[0]
        if not self._is_idle(root) or not self.gathers.may_free_until_used(root):
            return
        if root.is_pinned or self.saved.needs_root() or root.is_viewed:
            return
        self._uses[root].in_backward = False
        self.gathers.free_until_used(root, partial(self._make_ready_for_backward, root))

    def _free_after_inner_backward(self) -> None:
        """Free what was gathered by a backward that ran inside the closing one, or before it, and has ended."""
        if self._in_step and not self._closing.is_open:
            return
        for unit, task in list(self._inner.items()):
            if task > current_task():  # a backward inside another has the greater id
                del self._inner[unit]
                if not self._uses[unit].running:
                    self._after_backward(unit)

    def _agree_on_order(self) -> None:
        """Agree on one order after the first microbatch, see `Reductions.agree`; without agreement do not prefetch."""
        self._agreed = True
        gathered = self.gathers.order_of_microbatch.units
        if not self._reductions.agree(gathered):
            self.gathers.depth = 0
