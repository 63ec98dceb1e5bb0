"""Parameters that somebody has replaced, moved, thawed or written behind the engine.

The engine trains the parameters it was given, in the memory it put them in. Plain code may call `model.to(...)`, assign
`module.weight = nn.Parameter(...)` or `parameter.data = ...`, or thaw a parameter; the model would go on with weights
that nobody trains. The check at the beginning of a microbatch costs some tens of microseconds.

[Note: past the counter] A write through `parameter.data` or NumPy leaves the version as it is. Of weights that rest
whole the bits are summed after the first two steps and every hundredth, and compared until the next step: what a
program does after each step (a WGAN's clipping) is seen, at the cost of reading the weights in few steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroexp.process.world import World
from zeroexp.zero.held import Residence, unguarded
from zeroexp.zero.unit import Unit

AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _ParameterSlot:
    """A slot is where a module holds a parameter."""

    held: dict[str, nn.Parameter | None]
    key: str
    parameter: nn.Parameter | None
    name: str


class ParameterWatch:
    """What `module` held when the engine was built around it."""

    def __init__(self, module: nn.Module, units: Iterable[Unit], world: World):
        self._units = list(units)
        modules = list(module.named_modules())
        self._slots = [
            _ParameterSlot(each._parameters, key, parameter, f"{name}.{key}" if name else key)
            for name, each in modules
            for key, parameter in each._parameters.items()
        ]
        self._children = [
            (each._modules, key, child, f"{name}.{key}" if name else key)
            for name, each in modules
            for key, child in each._modules.items()
        ]
        self._held = [(each._parameters, len(each._parameters), name) for name, each in modules]
        self._num_children = [(each._modules, len(each._modules), name) for name, each in modules]
        masters = [pair for unit in self._units for pair in unit.parameters_with_masters()]
        self._all = [p for unit in self._units for p in unit.parameters]
        self._all += [master for _, master in masters]
        # Plain code may write parameters on a single rank whose optimizer updates the parameters themselves.
        self._alone = world.size == 1 and all(
            held.master_flat is None and not unit.is_sharded
            for unit in self._units
            for held in unit.trainable
        )
        self._summed = [
            parameter
            for unit in self._units
            if not (unit.is_sharded or world.is_fake or self._alone)
            for parameter in unit.trainable_parameters
        ]
        self._num_steps = 0
        self._sums: list[int] = []  # empty where the values are not compared
        self.note_versions()
        self._frozen = [
            parameter
            for unit in self._units
            for held in unit.held
            if not held.is_trainable
            for parameter in held.parameters
        ]
        self._names = {slot.parameter: slot.name for slot in self._slots}
        self._names |= {master: self._names[parameter] for parameter, master in masters}
        # Tensors of a fake world may have no address.
        self._addresses = [
            (parameter, view.data_ptr())
            for unit in self._units
            if not unit.is_sharded and not world.is_fake
            for held in unit.held
            for parameter, view in zip(held.parameters, held.views, strict=True)
        ]

    def note_versions(self, *, stepped: bool = False) -> None:
        """Accept the weights as they are now; the engine calls this after it has changed them itself."""
        self._num_steps += stepped
        self._versions = self._read_versions()
        self._sums = self._read_sums() if is_compared(self._num_steps) else []

    def were_written(self) -> bool:
        """Tell whether parameters were written in place since `note_versions` or the microbatch's beginning."""
        if self._versions != self._read_versions():
            return True
        return bool(self._sums) and self._sums != self._read_sums()

    def refuse_writes(self) -> None:
        """Raise RuntimeError if a parameter was written in place inside a microbatch.

        Ranks may have written different values, and values written into gathered parameters are lost.
        """
        for parameter, before, now in zip(
            self._all, self._versions, self._read_versions(), strict=True
        ):
            if before != now:
                raise RuntimeError(
                    f"parameter {self._names[parameter]} was written in place inside a microbatch, by its module's "
                    "forward perhaps (max_norm of an embedding is one such): write weights between steps, inside "
                    "`with strategy.gathered(write=True):`"
                )

    def _read_versions(self) -> list[int]:
        with unguarded():
            return [parameter._version for parameter in self._all]

    def _read_sums(self) -> list[int]:
        """Return a sum over the bits of each parameter's values, see [Note: past the counter]."""
        return [_sum_of_bits(parameter.detach()) for parameter in self._summed]

    def refuse_writes_between(self) -> None:
        """Raise RuntimeError if parameters, or the optimizer's own tensors, were written in place between two steps."""
        if not self._alone and self.were_written():
            raise RuntimeError(
                "parameters were written in place between two steps, while other ranks may still have been reading "
                "them: write weights inside `with strategy.gathered(write=True):`"
            )

    def refuse_changes(self) -> None:
        """Raise RuntimeError if something was changed; it names the parameter or module and the remedy."""
        self.refuse_writes_between()
        self._versions = self._read_versions()
        self._refuse_other_modules()
        with unguarded():
            self._refuse_other_values()

    def _refuse_other_modules(self) -> None:
        """Raise RuntimeError if a module or parameter was replaced, removed or added."""
        for slot in self._slots:
            if slot.held.get(slot.key) is not slot.parameter:
                raise _changed(slot.name, "was replaced or removed")
        for children, key, child, name in self._children:
            if children.get(key) is not child:
                raise RuntimeError(
                    f"module {name} was replaced or removed after the engine was built: change the model before"
                )
        for children, count, name in self._num_children:
            for key, child in list(children.items())[count:]:
                if child is not None and not self._names.keys() >= set(child.parameters()):
                    raise RuntimeError(
                        f"module {f'{name}.{key}'.lstrip('.')} was added after the engine was built, and nobody would "
                        "train it: change the model before"
                    )
        for held, count, name in self._held:
            if len(held) != count:
                raise _changed(f"{name}.{list(held)[-1]}", "was added")

    def _refuse_other_values(self) -> None:
        """Raise RuntimeError if a parameter was thawed, given other memory or moved."""
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {self._names[parameter]} was frozen when the engine was built and requires a "
                    "gradient now: build the engine again, or thaw it before and freeze it after building"
                )
        freed = (u for u in self._units if u.residence is Residence.FREED and not u.is_pinned)
        for parameter in (p for unit in freed for p in _shown_otherwise(unit)):
            raise _changed(self._names[parameter], "was given other values")
        for parameter, address in self._addresses:
            if parameter.data_ptr() != address:
                raise _changed(self._names[parameter], "was moved or converted")


def is_compared(num_steps: int) -> bool:
    """Tell whether the last of so many steps is one whose weights are worth a look at their values."""
    return 0 < num_steps <= 2 or (num_steps > 0 and num_steps % 100 == 0)


def _shown_otherwise(unit: Unit) -> Iterator[nn.Parameter]:
    """Yield the parameters of a freed unit that somebody has given other memory."""
    for held in unit.held:
        for parameter, nothing in zip(held.parameters, held.nothing, strict=True):
            if parameter.untyped_storage()._cdata != nothing.untyped_storage()._cdata:
                yield parameter


def _sum_of_bits(tensor: Tensor) -> int:
    bits = tensor.reshape(-1).view(AS_INTEGERS[tensor.itemsize])
    if bits.device.type == "cpu":
        return int(
            bits.numpy().sum(dtype="int64")
        )  # torch would copy all of it into the wider dtype
    return int(bits.sum(dtype=torch.int64))


def _changed(name: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"parameter {name} {what} after the engine was built: change the model before, or write weights inside "
        "`with strategy.gathered(write=True):`"
    )
