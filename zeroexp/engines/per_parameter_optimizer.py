"""An optimizer over flat tensors, each of which holds parts of many parameters, seen parameter by parameter.

DeepSpeed gives the optimizer such tensors and steps it once for each of them. A canonical state and its loading go by
parameters (interface/saved_state.py), and so do the hooks around a step (interface/python_values.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroexp.interface.canonical import is_moment
from zeroexp.interface.python_values import PythonValues
from zeroexp.interface.reshard import fill_from_canonical
from zeroexp.interface.strategy import CanonicalState


@dataclass(frozen=True, eq=False)
class Part:
    """What this rank holds of one parameter: `weight`, the elements of `flat` from `offset` on."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int  # the parameter's element that is the first of `weight`
    flat: Tensor
    offset: int
    numel: int
    is_trained: bool
    weight: Tensor

    def of(self, flat: Tensor) -> Tensor:
        """Return the same elements of a tensor that is laid out like `flat`."""
        return flat.detach()[self.offset : self.offset + self.numel]


class PerParameterOptimizer:
    """The optimizer's state by weight: what `read` shows, and `write` puts back into the flat tensors."""

    moments_dtype = None  # see `empty_moment`

    def __init__(self, optimizer: Optimizer, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._optimizer = optimizer
        self._before: list[Callable[[], object]] = []
        self._after: list[Callable[[], object]] = []
        self._without_moments: set[Tensor] = set()  # weights that were loaded without, until a step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def register_step_pre_hook(self, hook: Callable[[], object]) -> None:
        self._before.append(hook)

    def register_step_post_hook(self, hook: Callable[[], object]) -> None:
        self._after.append(hook)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the hooks around a step of all flat tensors."""
        for hook in self._before:
            hook()
        yield
        self._without_moments.clear()
        for hook in self._after:
            hook()

    def read(self) -> None:
        """Show the moments' elements of each part, as views."""
        self.state.clear()
        for part in (part for part in self.parts if part.weight not in self._without_moments):
            for key, value in self._optimizer.state.get(part.flat, {}).items():
                of_elements = isinstance(value, Tensor) and value.shape == part.flat.shape
                self.state[part.weight][key] = part.of(value) if of_elements else value

    def write(self) -> None:
        """Make moments of the flat tensors; elements of no parameter are zero."""
        states: dict[Tensor, dict[str, Any]] = {}
        self._without_moments = {p.weight for p in self.parts if not self.state[p.weight]}
        for part in (part for part in self.parts if part.is_trained):
            own = states.setdefault(part.flat, {})
            for key, value in self.state[part.weight].items():
                if isinstance(value, Tensor) and value.shape == part.weight.shape:
                    flat = part.flat.detach()
                    whole = own.setdefault(key, torch.zeros_like(flat, dtype=value.dtype))
                    part.of(whole).copy_(value)
                else:
                    own[key] = value
        self._optimizer.state.update(states)


class SharedNumbers(PythonValues):
    """Python values, and numbers of parameters, as the step: a flat tensor has one for all, and others are refused."""

    def require(self, state: CanonicalState) -> None:
        super().require(state)
        for names in self._names:
            numbers: dict[str, tuple[str, float]] = {}
            for name, key in ((each, key) for each in names for key in state[each]):
                if not is_moment(key) or state[name][key].shape:
                    continue
                number = torch.empty(1, dtype=state[name][key].dtype)
                fill_from_canonical(number, state[name][key], name=f"{name}.{key}")
                other, expected = numbers.setdefault(key, (name, number.item()))
                if number.item() != expected:
                    problem = f"{key} is {expected:g} for {other} and {number.item():g} for {name}"
                    remedy = "load it into another engine"
                    raise ValueError(f"{problem}, and DeepSpeed keeps one for a group; {remedy}")
