"""Hooks tie a unit to the forward and backward of its module; the table shows what each hook tells.

forward-pre hook            the unit's parameters are needed
forward hook                they are not needed until backward; each output tensor gets a hook
hook on an output tensor    backward reaches the module (module backward hooks do not fire where the output is
                            no tuple of tensors, as at the root of a Hugging Face model)
post-accumulate hook        a parameter's gradient is complete

`tensors_in` looks for tensors in outputs. For a tensor that it does not find the gather starts later, when autograd
asks for what it saved (saved.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroexp.sharding.guard import unguarded
from zeroexp.sharding.observer import Observer
from zeroexp.sharding.schedule import Schedule, Ticks
from zeroexp.sharding.unit import Unit


def attach(unit: Unit, module: nn.Module, schedule: Schedule, observer: Observer) -> None:
    """Report what happens to `module` and its unit's parameters to the schedule.

    A copy of the module takes the hooks along, which then do nothing. The pre-hook comes first, since other pre-hooks
    compute with the weights (`weight_norm`). The compiler does not trace the two forward hooks.
    """

    def before_forward(called: nn.Module, _args: Any) -> None:
        if called is module:
            schedule.before_forward(unit)

    def after_forward(called: nn.Module, _args: Any, output: Any) -> None:
        if called is not module:
            return
        ticks = schedule.after_forward(unit, differentiable=torch.is_grad_enabled())
        for tensor in tensors_in(output):
            observer.returned(unit, tensor)
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(partial(before_backward, ticks))

    def before_backward(ticks: Ticks, _gradient: Tensor) -> None:
        schedule.before_backward(unit, ticks)

    module.register_forward_pre_hook(_uncompiled(before_forward), prepend=True)
    module.register_forward_hook(_uncompiled(after_forward), always_call=True)
    for parameter in unit.trainable_parameters():
        told = partial(_gradient_ready, weakref.ref(schedule), weakref.ref(unit))
        parameter.register_post_accumulate_grad_hook(told)


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile calls without tracing it."""
    return torch.compiler.disable(hook)  # pyright: ignore[reportReturnType]


def _gradient_ready(
    schedule: weakref.ref[Schedule], unit: weakref.ref[Unit], parameter: Tensor
) -> None:
    """Tell the schedule of a gradient.

    Autograd keeps this hook as long as the parameter, where the cycle collector does not see it. So the hook holds only
    weak references to the engine.
    """
    engine, its = schedule(), unit()
    if engine is not None and its is not None:
        assert isinstance(parameter, nn.Parameter)
        if _somebody_took_gradient(parameter):
            raise RuntimeError(
                f"a hook of {its} has taken a gradient before the engine reduced it over the ranks: an optimizer "
                "inside backward updates by one rank's gradient; call strategy.step() instead"
            )
        engine.gradient_ready(its, parameter)


def _somebody_took_gradient(parameter: nn.Parameter) -> bool:
    """Tell whether an earlier hook took the gradient; without other hooks a custom function may have given none."""
    with unguarded():
        hooks = parameter._post_accumulate_grad_hooks
        return parameter.grad is None and hooks is not None and len(hooks) > 1


def tensors_in(output: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))
