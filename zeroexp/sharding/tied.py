"""The gradient of a weight that is embedding and head at once, held dense once instead of three times.

The head's gradient is dense and comes first, the embedding's comes last: a few rows, which autograd would spread over
a dense tensor of zeros to add it. Here rows stay rows:

    backward of the head         dense; autograd keeps it until every use of the weight had its backward
    backward of the embedding    ids and rows, kept here; for autograd the weight gets nothing from it
    then, all uses done          the dense gradient is `weight.grad`, and the rows are added to it in place

Bit for bit what autograd does with one head: the rows of one id are summed by its own kernel, then added once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding


def keep_rows_apart(module: nn.Module) -> None:
    """For every embedding in `module` whose trainable weight is another module's too."""
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for user in module.modules():
        for parameter in user.parameters(recurse=False):
            users.setdefault(parameter, set()).add(user)
    for weight, sharing in users.items():
        lookups = [user for user in sharing if isinstance(user, nn.Embedding) and _is_plain(user)]
        if weight.requires_grad and 0 < len(lookups) < len(sharing):
            gradient = _TiedGradient()
            for each in lookups:
                each.forward = partial(_look_up, each, gradient)
            weight.register_hook(partial(gradient.before_accumulation, weight))
            weight.register_post_accumulate_grad_hook(gradient.after_accumulation)


def _is_plain(lookup: nn.Embedding) -> bool:
    """Neither a subclass with a forward of its own nor one of the options that change what its backward does."""
    ordinary = lookup.max_norm is None and not lookup.scale_grad_by_freq and not lookup.sparse
    return type(lookup) is nn.Embedding and ordinary


@dataclass
class _TiedGradient:
    """What one weight has got in this backward beside the dense gradient."""

    rows: list[tuple[Tensor, Tensor]] = field(
        default_factory=list
    )  # slots with ids, and their sums
    earlier: Tensor | None = None  # of earlier microbatches

    def before_accumulation(self, weight: nn.Parameter, _gradient: Tensor) -> None:
        """Set the earlier sum aside: dense and rows of this microbatch come together first."""
        self.earlier, weight.grad = weight.grad, None

    def after_accumulation(self, weight: Tensor) -> None:
        gradient = weight.grad
        if gradient is None:  # the head was not used
            gradient = torch.zeros_like(weight)
        for ids, sums in self.rows:
            gradient.index_add_(0, ids, sums)
        weight.grad = gradient if self.earlier is None else self.earlier.add_(gradient)
        self.earlier = None
        self.rows.clear()


def _look_up(module: nn.Embedding, gradient: _TiedGradient, input: Tensor) -> Tensor:
    """The forward of nn.Embedding."""
    if torch.compiler.is_compiling():  # the compiler knows nothing of what backward leaves with us
        return embedding(input, module.weight, module.padding_idx)
    return _LookUp.apply(module.weight, input, module.padding_idx, gradient)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int | None, gradient: _TiedGradient
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.gradient = padding_idx, gradient
        return embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.gradient.rows.append(_sum_rows(ids, rows, ctx.padding_idx))
        return None, None, None, None


def _sum_rows(ids: Tensor, rows: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    """The ids sorted, and for each of them a row: where an id comes first its sum, where it comes again zeros.

    As many as there are tokens, so that nobody has to wait for a device to count the different ones.
    """
    ids = ids.flatten()
    in_order = ids.sort().values
    slots = torch.searchsorted(in_order, ids)  # where its id comes first
    if padding_idx is not None:
        slots.masked_fill_(ids == padding_idx, -1)
    sums = torch.ops.aten.embedding_dense_backward(
        rows.reshape(ids.numel(), -1), slots, ids.numel(), -1, False
    )
    return in_order, sums
