"""This file sums the gradient of a weight that is embedding and head at once, without two more dense tensors.

The head's gradient is dense and comes first. The embedding's gradient comes last and has few rows, which autograd would
spread over a dense tensor of zeros before it adds them. Here rows stay rows:

    backward of the head         its gradient is dense; autograd keeps it until every use had its backward
    backward of the embedding    ids and rows are kept here; autograd gets nothing
    after all uses               the dense gradient is `weight.grad`, and the rows are added to it in place

The result equals autograd's where one dense gradient comes before the embedding's: autograd's own kernel sums the rows
of one id, and the sum is added once. `torch.autograd.grad` with respect to such a weight sees the head's part alone.

[Note: one stream] Autograd makes the streams of a GPU wait for gradients that pass through it. Rows do not pass through
it, so forward and backward of a model must run on one stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding


def keep_rows_apart(module: nn.Module) -> list[TiedGradient]:
    """Keep rows apart for each trainable weight that embeddings in `module` share with a module of another kind."""
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for user in module.modules():
        for parameter in user.parameters(recurse=False):
            users.setdefault(parameter, set()).add(user)
    tied: list[TiedGradient] = []
    for weight, sharing in users.items():
        lookups = [user for user in sharing if isinstance(user, nn.Embedding)]
        if (
            weight.requires_grad
            and 0 < len(lookups) < len(sharing)
            and all(map(_is_plain, lookups))
        ):
            gradient = TiedGradient(weight)
            for each in lookups:
                each.forward = partial(_look_up, each, gradient)
            # Autograd keeps the hook as long as the weight, so the hook itself must hold no weight.
            weight.register_post_accumulate_grad_hook(partial(_add_rows, weakref.ref(gradient)))
            tied.append(gradient)
    return tied


def _is_plain(lookup: nn.Embedding) -> bool:
    """Tell whether `lookup` is no subclass, has its own forward and no option that changes its backward."""
    usual = type(lookup) is nn.Embedding and "forward" not in vars(lookup)
    return usual and lookup.max_norm is None and not (lookup.scale_grad_by_freq or lookup.sparse)


class TiedGradient:
    """This object keeps the rows that one weight got in this backward beside the dense gradient."""

    def __init__(self, weight: nn.Parameter | None):
        self.weight = weight
        self._rows: list[tuple[Tensor, Tensor]] = []  # pairs of ids and a row for each id
        self._earlier: Tensor | None = None  # the sum of earlier microbatches

    def __reduce__(self) -> tuple[Callable[..., TiedGradient], tuple[None]]:
        """Copy as an object without weight: a copy of the model has no hooks, and its embeddings are plain ones."""
        return TiedGradient, (None,)

    def keep(self, ids: Tensor, sums: Tensor) -> None:
        """Keep rows before autograd accumulates, and set the earlier sum aside.

        The dense gradient and the rows of one backward are thereby summed before the earlier sum is added.
        """
        assert self.weight is not None
        if not self._rows:
            self._earlier, self.weight.grad = self.weight.grad, None
        self._rows.append((ids, sums))

    def add_rows(self, weight: Tensor) -> None:
        """Add the rows to the dense gradient that autograd accumulated, and the result to the earlier sum."""
        if not self._rows:
            return
        gradient = weight.grad
        if gradient is None:  # the head was not used in this backward
            gradient = torch.zeros_like(weight)
        for ids, sums in self._rows:
            gradient.index_add_(0, ids, sums)
        weight.grad = gradient if self._earlier is None else self._earlier.add_(gradient)
        self.clear()

    def clear(self) -> None:
        """Drop the rows and the earlier sum, such as a backward that raised leaves behind."""
        self._rows.clear()
        self._earlier = None


def _add_rows(gradient: weakref.ref[TiedGradient], weight: Tensor) -> None:
    told = gradient()
    if told is not None:
        told.add_rows(weight)


def _look_up(module: nn.Embedding, gradient: TiedGradient, input: Tensor) -> Tensor:
    """Compute the forward of nn.Embedding, with rows kept apart where that saves memory."""
    replaced = module.weight is not gradient.weight
    as_large = input.numel() >= module.num_embeddings  # rows would be as large as a dense tensor
    if replaced or as_large or torch.compiler.is_compiling():
        return embedding(input, module.weight, module.padding_idx)
    return _LookUp.apply(module.weight, input, module.padding_idx, gradient)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int | None, gradient: TiedGradient
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.gradient = padding_idx, gradient
        return embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.gradient.keep(*_sum_rows(ids.flatten().contiguous(), rows, ctx.padding_idx))
        return None, None, None, None


def _sum_rows(ids: Tensor, rows: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    """Return the ids sorted and a row for each: the sum where an id comes first, zeros where it comes again.

    There are as many rows as tokens, so that nobody waits for a device to count the different ids.
    """
    in_order = ids.sort().values
    first = torch.searchsorted(in_order, ids)
    if padding_idx is not None:
        first.masked_fill_(ids == padding_idx, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    sums = torch.ops.aten.embedding_dense_backward(rows, first, len(ids), -1, False)
    return in_order, sums
