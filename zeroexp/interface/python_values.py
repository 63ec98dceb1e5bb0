"""Save and load the optimizer state that is not in tensors: Python values per parameter, and counters in groups.

    optimizer.state[p]["step"] = 3            an int, a float, a bool, a str or None of one parameter
    optimizer.param_groups[0]["k"] = 3        a group's value: state only if the optimizer's own step changes it; a
                                              learning rate or decay that the user sets is the new run's own choice

In a canonical state they form one entry of each parameter, "python": JSON as bytes, which keeps types and every bit of
a float. Each parameter's entry repeats the numbers of its group, since the loading run may group parameters
differently. Only the rank that holds the parameter's first element contributes the entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroexp.interface.canonical import PYTHON, canonical_of_one_rank
from zeroexp.interface.loss_scale import COUNT, SCALE
from zeroexp.interface.reshard import fill_from_canonical
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor

Values = dict[str, Any]


class PythonValues:
    """The Python values of one optimizer, whose further steps it watches to learn which group options are counters."""

    def __init__(
        self,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        mirrors: Sequence[Optimizer] = (),
    ) -> None:
        """Watch `optimizer` from now on.

        names: the parameters in each group, including those that other ranks hold. mirrors: optimizers whose groups
        must show the same values.
        """
        self._optimizer, self._mirrors = optimizer, mirrors
        self._names = [list(group) for group in names]
        self._group_of = {name: i for i, group in enumerate(names) for name in group}
        self._at_first = self._current_values()
        self._before = self._at_first
        # A loss scale changes outside of the step.
        self._counted = [{SCALE, COUNT} & {*group} for group in optimizer.param_groups]
        self._num_keys = 0  # of the optimizer's state, when all were parameters
        optimizer.register_step_pre_hook(lambda *_: self._note_values_before())
        optimizer.register_step_post_hook(lambda *_: self._note_changed_keys())

    def of(self, name: str, parameter: Tensor) -> dict[str, CanonicalTensor]:
        """Return the entry to add to this parameter's state; it is empty if there are no values."""
        if len(self._optimizer.state) != self._num_keys:
            for key in self._optimizer.state:
                if not isinstance(key, Tensor):
                    raise ValueError(self._unknown(key, "outside of any parameter"))
            self._num_keys = len(self._optimizer.state)
        own = self._optimizer.state.get(parameter, {})
        values = {
            "state": {key: value for key, value in own.items() if not isinstance(value, Tensor)},
            "group": self._numbers_of(name),
        }
        for key, value in [pair for each in values.values() for pair in each.items()]:
            if not isinstance(value, (int, float, str, type(None))):
                raise ValueError(self._unknown(key, f"of {name}", value))
        content = torch.tensor([*json.dumps(values).encode()], dtype=torch.uint8, device="cpu")
        return {PYTHON: canonical_of_one_rank(content)} if any(values.values()) else {}

    def require(self, state: CanonicalState) -> None:
        """Raise ValueError if values are in no piece, or if parameters of one group carry different numbers."""
        for names in self._names:
            self._saved_numbers(state, names)

    def load(self, state: CanonicalState) -> None:
        """Set the groups' numbers. The caller loads a parameter's own values with `own_values`."""
        for i, names in enumerate(self._names):
            # A loss scale is of a float16 run alone.
            unscaled = {SCALE, COUNT} - self._at_first[i].keys()
            saved = self._saved_numbers(state, names)
            counted = {key: value for key, value in saved.items() if key not in unscaled}
            again = self._counted[i] & self._at_first[i].keys()
            for optimizer in (self._optimizer, *self._mirrors):
                optimizer.param_groups[i].update({key: self._at_first[i][key] for key in again})
                optimizer.param_groups[i].update(counted)
            self._counted[i] |= counted.keys()

    def _saved_numbers(self, state: CanonicalState, names: Sequence[str]) -> Values:
        counted = [
            _values_from_state(state[name], name)["group"]
            for name in names
            if PYTHON in state.get(name, {})
        ]
        for other in counted[1:]:
            if other != counted[0]:
                raise ValueError(
                    f"state of {names[0]} and the others of its param_group: they counted {counted[0]} "
                    f"and {other}; use the param_groups that they were trained in"
                )
        return counted[0] if counted else {}

    def _numbers_of(self, name: str) -> Values:
        if (i := self._group_of.get(name)) is None:
            return {}
        group = self._optimizer.param_groups[i]
        return {key: group[key] for key in sorted(self._counted[i])}

    def _current_values(self) -> list[Values]:
        """Return each group's options; a tensor, which changes in place, is represented by its identity and version."""
        return [
            {
                key: (id(value), value._version) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def _note_values_before(self) -> None:
        self._before = self._current_values()

    def _note_changed_keys(self) -> None:
        values = zip(self._counted, self._before, self._current_values(), strict=True)
        for counted, before, now in values:
            counted |= {key for key in now if key not in before or _differ(before[key], now[key])}

    def _unknown(self, key: object, where: str, value: object = None) -> str:
        what = "state" if value is None else f"a {type(value).__name__}"
        problem = f"optimizer {type(self._optimizer).__name__} keeps {what} under {key!r} {where}"
        return f"{problem}, which no checkpoint can carry: train without checkpoints or use another optimizer"


def own_values(entry: Mapping[str, CanonicalTensor], name: str) -> Values:
    """Return the non-tensor values that the optimizer kept for this parameter."""
    return _values_from_state(entry, name)["state"] if PYTHON in entry else {}


def _values_from_state(entry: Mapping[str, CanonicalTensor], name: str) -> dict[str, Values]:
    flat = torch.empty(entry[PYTHON].shape, dtype=torch.uint8, device="cpu")
    fill_from_canonical(flat, entry[PYTHON], name=f"{name}.{PYTHON}")
    return json.loads(bytes(flat.tolist()))


def _differ(before: Any, now: Any) -> bool:
    """Compare values of simple types by value and all others by identity."""
    if isinstance(now, (int, float, str, tuple)) and type(before) is type(now):
        return before != now
    return before is not now
