"""Parameters that somebody has replaced, moved, thawed or written behind the engine.

The engine trains the parameters it was given, in the memory it put them in. Plain code may call `model.to(...)`, assign
`module.weight = nn.Parameter(...)` or `parameter.data = ...`, or thaw a parameter; the model would go on with weights
that nobody trains. The check at the beginning of a microbatch costs some tens of microseconds.

[Note: past the counter] A write through `parameter.data` or NumPy leaves the version as it is. Of weights that rest
whole the bits are summed after the first two steps and every hundredth, and compared until the next step: what a
program does after each step (a WGAN's clipping) is seen, at the cost of reading the weights in few steps. Of gathered
ones they are summed in these steps when they arrive and before they are freed: what a forward writes would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import methodcaller
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from zeroexp.zero.assemble import AS_INTEGERS
from zeroexp.zero.engine import Engine
from zeroexp.zero.gathered_parameters import written_while_reading
from zeroexp.zero.held import Held, unguarded
from zeroexp.zero.observer import Observer
from zeroexp.zero.unit import Unit


class Registered:
    """The dicts of modules in which torch keeps their parameters, or their children, as they were at first."""

    def __init__(self, dicts: Mapping[str, Mapping[str, Any]]):
        """dicts: by the module's name."""
        self._names, self._dicts = [*dicts], [*dicts.values()]
        self._before = [dict(each) for each in self._dicts]
        self._seen = self._see()

    def _see(self) -> tuple[list[int], list[str], list[int]]:
        """Return how many entries each has, their keys, and ids of their values, without a line of Python for each."""
        values = chain.from_iterable(map(methodcaller("values"), self._dicts))
        return [*map(len, self._dicts)], [*chain.from_iterable(self._dicts)], [*map(id, values)]

    def changes(self) -> Iterator[tuple[str, bool, Any]]:
        """Yield the name of what is no longer there, and of what came later; whether it did, and what is there now."""
        if self._see() == self._seen:
            return
        for module, before, now in zip(self._names, self._before, self._dicts, strict=True):
            for key in {**before, **now}:
                if now.get(key) is not before.get(key):
                    yield f"{module}.{key}".lstrip("."), key not in before, now.get(key)


class ChangedParameters(Observer):
    """What modules and parameters were when the engine was built, and what the weights are since its last change."""

    # Units whose parameters have an address; those of a fake world may have none.
    _placed: Sequence[Unit] = ()

    def built(self, engine: Engine) -> None:
        self._units, world = engine.units, engine.wire.world
        named = dict(engine.model.named_modules())
        self._registered = Registered({n: m._parameters for n, m in named.items()})
        self._children = Registered({n: m._modules for n, m in named.items()})
        names = engine.model.named_parameters(remove_duplicate=False)
        self._names = {parameter: name for name, parameter in names}
        masters = [pair for unit in self._units for pair in unit.parameters_with_masters()]
        self._names |= {master: self._names[parameter] for parameter, master in masters}
        chunks = [held for unit in self._units for held in unit.held]
        # Plain code may write parameters on a single rank whose optimizer updates the parameters themselves.
        may_write = world.size == 1 and not any(
            unit.is_sharded or held.master_flat is not None
            for unit in self._units
            for held in unit.trainable
        )
        whole = [] if world.is_fake else [u for u in self._units if not u.is_sharded]
        written = [p for u in self._units for p in u.parameters] + [m for _, m in masters]
        self._all = [] if may_write else written
        self._summed = [] if may_write else [p for u in whole for p in u.trainable_parameters]
        self._num_steps = 0
        # Inside of `gathered()`, of `gathered(write=True)`.
        self._is_gathered = self._may_write = False
        self._frozen = [p for held in chunks if not held.is_trainable for p in held.parameters]
        self._placed = () if world.is_fake else self._units
        self._bits_shown: dict[int, list[int]] = {}  # of the parameters of a chunk, by its id
        self.weights_changed()

    def showing(self, held: Held, *, there: bool) -> None:
        """Raise RuntimeError if a forward wrote values into gathered parameters, which are about to be freed.

        See [Note: past the counter].
        """
        if not self._placed or self._is_gathered:
            return
        with unguarded():
            self._refuse_moved(held)
        if not there:
            before = self._bits_shown.pop(id(held), None)
            if before is not None:
                self._refuse_other_bits(held, before)
        elif is_compared(self._num_steps + 1):
            self._bits_shown[id(held)] = [_sum_of_bits(view) for view in held.views]

    def saving(self) -> None:
        if self._may_write:
            raise RuntimeError(
                "strategy.state_dict() inside strategy.gathered(write=True): what is written becomes the weights as "
                "the `with` ends; call it after that"
            )

    def loading(self) -> None:
        if self._is_gathered:
            raise RuntimeError(
                "strategy.load_state_dict() inside strategy.gathered(): call it after the `with` has ended"
            )

    def begin_microbatch(self) -> None:
        """Raise RuntimeError if something was changed; it names the parameter or module and the remedy."""
        if self._may_write:
            raise RuntimeError(
                "a microbatch inside strategy.gathered(write=True): begin it after the `with` has ended"
            )
        self._refuse_writes_between()
        self._refuse_other_modules()
        with unguarded():
            self._refuse_other_values()

    def end_microbatch(self, *, last: bool) -> None:
        """Raise RuntimeError if a parameter was written in place inside a microbatch.

        Ranks may have written different values, and values written into gathered parameters are lost.
        """
        pairs = zip(self._versions, self._read_versions(), strict=True)
        for parameter, (before, now) in zip(self._all, pairs, strict=True):
            if before != now:
                raise self._written(parameter)

    @contextmanager
    def gathered(self, *, write: bool, in_microbatch: bool) -> Iterator[None]:
        if write and self._is_gathered and not self._may_write:
            raise RuntimeError(
                "strategy.gathered(write=True) inside strategy.gathered(), which is for reading: leave the outer one "
                "first, or let it write"
            )
        outer = self._is_gathered, self._may_write
        self._is_gathered, self._may_write = True, write or self._may_write
        try:
            yield
        finally:
            self._is_gathered, self._may_write = outer
        if in_microbatch:
            return  # its end refuses what was written
        if not (write or self._may_write) and self._were_written():
            raise written_while_reading()
        self.weights_changed()

    def step(self, *, is_gathered: bool) -> None:
        self._refuse_writes_between()

    def weights_changed(self, *, stepped: bool = False, are_equal: bool = True) -> None:
        """Accept the weights as they are now."""
        self._num_steps += stepped
        self._versions = self._read_versions()
        # [Note: past the counter]
        compares = is_compared(self._num_steps)
        self._sums = [_sum_of_bits(p.detach()) for p in self._summed] if compares else []

    def _were_written(self) -> bool:
        """Tell whether parameters were written in place since `weights_changed` or the microbatch's beginning."""
        if self._versions != self._read_versions():
            return True
        sums = self._summed if self._sums else []
        return self._sums != [_sum_of_bits(parameter.detach()) for parameter in sums]

    def _read_versions(self) -> list[int]:
        with unguarded():
            return [parameter._version for parameter in self._all]

    def _refuse_writes_between(self) -> None:
        if self._were_written():
            raise RuntimeError(
                "parameters were written in place between two steps, while other ranks may still have been reading "
                "them: write weights inside `with strategy.gathered(write=True):`"
            )

    def _refuse_other_modules(self) -> None:
        """Raise RuntimeError if a module or parameter was replaced, removed or added."""
        for name, is_new, _ in self._registered.changes():
            raise _changed(name, "was added" if is_new else "was replaced or removed")
        for name, is_new, child in self._children.changes():
            if not is_new:
                raise RuntimeError(
                    f"module {name} was replaced or removed after the engine was built: change the model before"
                )
            if child is not None and not self._names.keys() >= set(child.parameters()):
                raise RuntimeError(
                    f"module {name} was added after the engine was built, and nobody would train it: change the "
                    "model before"
                )

    def _refuse_other_values(self) -> None:
        """Raise RuntimeError if a parameter was thawed, given other memory or moved."""
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {self._names[parameter]} was frozen when the engine was built and requires a "
                    "gradient now: build the engine again, or thaw it before and freeze it after building"
                )
        placed = [held for unit in self._placed if not unit.is_pinned for held in unit.held]
        shown = [view.data_ptr() for held in placed for view in held.shown]
        if shown != [parameter.data_ptr() for held in placed for parameter in held.parameters]:
            for held in placed:
                self._refuse_moved(held)

    def _refuse_other_bits(self, held: Held, before: list[int]) -> None:
        """Raise RuntimeError if the values that parameters show are not those that they showed before."""
        for parameter, bits, view in zip(held.parameters, before, held.views, strict=True):
            if _sum_of_bits(view) != bits:
                raise self._written(parameter)

    def _written(self, parameter: nn.Parameter) -> RuntimeError:
        return RuntimeError(
            f"parameter {self._names[parameter]} was written in place inside a microbatch, by its module's forward "
            "perhaps (max_norm of an embedding is one such): write weights between steps, inside "
            "`with strategy.gathered(write=True):`"
        )

    def _refuse_moved(self, held: Held) -> None:
        """Raise RuntimeError if somebody gave a parameter other memory."""
        for parameter, view in zip(held.parameters, held.shown, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                raise _changed(self._names[parameter], "was moved or given other values")


def is_compared(num_steps: int) -> bool:
    """Tell whether the last of so many steps is one whose weights are worth a look at their values."""
    return 0 < num_steps <= 2 or (num_steps > 0 and num_steps % 100 == 0)


def _sum_of_bits(tensor: Tensor) -> int:
    bits = tensor.reshape(-1).view(AS_INTEGERS[tensor.itemsize])
    if bits.device.type == "cpu":
        # torch would copy all of it into the wider dtype, and forbid that memory shown as `.numpy()` is resized.
        return int(numpy.from_dlpack(bits).sum(dtype="int64"))
    return int(bits.sum(dtype=torch.int64))


def _changed(name: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"parameter {name} {what} after the engine was built: change the model before, or write weights inside "
        "`with strategy.gathered(write=True):`"
    )
