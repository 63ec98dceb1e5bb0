"""The optimizer's own tensors, this rank's pieces of the weights: between two steps they are read, and never written.

Plain code decays, clips or averages over `optimizer.param_groups`, where it would find no gradients, and where what it
writes would reach one rank's share of the weights. Hooks of the optimizer's step see one rank's gradients alone, of
which no norm is that of the whole.

    inside of optimizer.step()    plain parameters, whose gradients are there
    else, and in others' hooks    `GuardedPiece`: a gradient that is read or set raises, and so does a write

Writing an alias (`.data`, `detach()`) is found by the version counter that it shares, see
changed_parameters.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from torch.utils._pytree import tree_leaves

from zeroexp.zero.engine import Engine
from zeroexp.zero.held import unguarded
from zeroexp.zero.observer import Observer
from zeroexp.zero_safety import tensor_functions as functions


class GuardedPiece(nn.Parameter):
    """A piece of the optimizer has this class outside of its step."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in functions.OF_GRADIENT:
            raise RuntimeError(
                "the gradients of the optimizer's tensors, which are this rank's pieces, are there while "
                "strategy.step() updates them alone: clip with max_grad_norm, change gradients by "
                "parameter.register_hook of the model's parameters"
            )
        with unguarded():
            if func == functions.GET_DATA:
                return args[0].detach()  # unlike `.data` it counts as a write what is written there
            pieces = [v for v in tree_leaves((args, kwargs)) if isinstance(v, GuardedPiece)]
            before = [piece._version for piece in pieces]
            replaces = func == functions.SET_DATA
            result = None if replaces else func(*args, **(kwargs or {}))
            if replaces or before != [piece._version for piece in pieces]:
                raise RuntimeError(
                    "tensors of the optimizer, which are this rank's pieces of the weights, were written outside of "
                    "its step (by hand, by a hook, or by a method such as its eval()): write weights inside "
                    "`with strategy.gathered(write=True):`"
                )
            return result

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy


class OwnPieces(Observer):
    """The pieces of one optimizer, guarded but while its own step runs."""

    def built(self, engine: Engine) -> None:
        optimizer = engine.optimizer
        pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
        self._pieces = [piece for piece in pieces if type(piece) is nn.Parameter]  # no fake tensor
        # torch calls them in order; it is typed as a dict.
        self._hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
        self._is_updating = False
        self._num_running = 0  # a step may call that of the class it inherits from
        self._opening = optimizer.register_step_pre_hook(self._open)
        optimizer.register_step_post_hook(self._close)
        self._guard(True)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let the optimizer's step run inside. Others' hooks before it find the pieces guarded, and so after."""
        self._hooks.move_to_end(self._opening.id)
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating, self._num_running = False, 0
            self._guard(True)

    def _open(self, *_: Any) -> None:
        if not self._is_updating:
            raise RuntimeError(
                "optimizer.step() was called directly: strategy.step() reduces, clips, updates and publishes"
            )
        self._num_running += 1
        self._guard(False)

    def _close(self, *_: Any) -> None:
        self._num_running -= 1
        self._guard(self._num_running == 0)

    def _guard(self, guarded: bool) -> None:
        for piece in self._pieces:
            piece.__class__ = GuardedPiece if guarded else nn.Parameter
