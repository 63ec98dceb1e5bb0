"""Ties a unit to the forward and backward of its module.

forward-pre hook            the unit's parameters are needed
forward hook                they are not, until backward; its output tensors get a hook each
hook on an output tensor    backward reaches the module (module backward hooks do not fire where the output is
                            no tuple of tensors, as at the root of a Hugging Face model)
post-accumulate hook        a parameter's gradient is complete
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroexp.sharding.overlap import Schedule, Ticks
from zeroexp.sharding.unit import Unit


def attach(unit: Unit, module: nn.Module, schedule: Schedule) -> None:
    """Report what happens to `module` and its unit's parameters to the schedule."""

    def before_forward(_module: nn.Module, _args: Any) -> None:
        schedule.before_forward(unit)

    def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        followed = [tensor for tensor in tensors if tensor.requires_grad]
        ticks = schedule.after_forward(unit, differentiable=torch.is_grad_enabled())
        for tensor in followed:
            tensor.register_hook(partial(before_backward, ticks))

    def before_backward(ticks: Ticks, _gradient: Tensor) -> None:
        schedule.before_backward(unit, ticks)

    def gradient_ready(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        schedule.gradient_ready(unit, parameter)

    module.register_forward_pre_hook(before_forward)
    module.register_forward_hook(after_forward)
    for parameter in unit.trainable_parameters():
        parameter.register_post_accumulate_grad_hook(gradient_ready)
