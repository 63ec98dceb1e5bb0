"""Methods of model and optimizer that would go past the engine raise, or do what the engine's own do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from zeroexp.zero.engine import Engine
from zeroexp.zero.observer import Observer


class OwnMethods(Observer):
    """Methods of a module and its optimizer, replaced or guarded for as long as an engine trains them."""

    may_load = False  # whether weights may be loaded into the module now

    def built(self, engine: Engine) -> None:
        self._module, optimizer = engine.model, engine.optimizer
        optimizer.zero_grad = engine.zero_grad
        optimizer.add_param_group = _refuse_group
        self._module.zero_grad = _ZeroGrad(self._module, engine.zero_grad)
        for each in self._module.modules():
            each.register_load_state_dict_pre_hook(partial(_refuse_loading, weakref.ref(self)))

    @contextmanager
    def gathered(self, *, write: bool, in_microbatch: bool) -> Iterator[None]:
        """Allow `model.load_state_dict()` inside where it may `write`, or where an outer context may."""
        before, self.may_load = self.may_load, write or self.may_load
        try:
            yield
        finally:
            self.may_load = before

    def holds(self, module: nn.Module) -> bool:
        """Tell whether `module` is part of the trained one, and not of a copy that took its hooks along."""
        return module in set(self._module.modules())


def _refuse_loading(
    methods: weakref.ref[OwnMethods], module: nn.Module, _state: dict[str, Any], *_: object
) -> None:
    """Raise where weights are loaded outside of `gathered(write=True)`, since the engine would not see them."""
    own = methods()
    if own is None or own.may_load or not own.holds(module):
        return
    raise RuntimeError(
        "model.load_state_dict() on a model that an engine trains: load inside "
        "`with strategy.gathered(write=True):`, or use strategy.load_state_dict()"
    )


def _refuse_group(param_group: dict[str, Any]) -> None:
    raise RuntimeError(
        "optimizer.add_param_group() on an engine's optimizer, which holds this rank's pieces: build the engine "
        "again with these param_groups"
    )


class _ZeroGrad:
    """`model.zero_grad` of a trained model; a copy of the model gets the plain method again."""

    def __init__(self, module: nn.Module, zero_grad: Callable[..., None]):
        self._module, self._zero_grad = module, zero_grad

    def __call__(self, set_to_none: bool = True) -> None:
        self._zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return partial(nn.Module.zero_grad, memo[id(self._module)])
