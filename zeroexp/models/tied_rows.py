"""Sum the gradient of a weight that is embedding and head at once, without two more dense tensors.

This is a setting of the model (`model.tied_rows`) and no part of ZeRO: every engine, native ones too, trains a model
with it or without it, and gets the same bits.

The head's gradient is dense and comes first. The embedding's gradient comes last and has few rows, which autograd would
spread over a dense tensor of zeros before it adds them. Here rows stay rows:

    backward of the head         its gradient is dense; autograd keeps it until every use had its backward
    backward of the embedding    ids and rows are kept here; autograd gets nothing
    after all uses               the dense gradient is `weight.grad`, and the rows are added to it in place

The result equals autograd's where one dense gradient comes before the embedding's: autograd's own kernel sums the rows
of one id, and the sum is added once. `torch.autograd.grad` with respect to such a weight sees the head's part alone.

[Note: one stream] Autograd makes the streams of a GPU wait for gradients that pass through it. Rows do not pass through
it, so forward and backward of a model must run on one stream.

[Note: which backward] Rows belong to the backward that made them, which autograd numbers. A backward that raised leaves
rows behind, and the next one drops them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

NO_BACKWARD = -1


def keep_rows_apart(module: nn.Module) -> int:
    """Keep rows apart for each trainable weight that embeddings in `module` share with a module of another kind.

    Embeddings that are subclasses, or whose options change their backward, stay as they are. Returns the number of
    weights found.
    """
    num_found = 0
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for user in module.modules():
        for parameter in user.parameters(recurse=False):
            users.setdefault(parameter, set()).add(user)
    for weight, sharing in users.items():
        lookups = [user for user in sharing if isinstance(user, nn.Embedding)]
        is_tied = weight.requires_grad and 0 < len(lookups) < len(sharing)
        if is_tied and all(map(_is_plain, lookups)):
            gradient = TiedGradient()
            if not weight.is_meta:  # an engine still puts its values in place
                gradient.belongs_to(weight)
            for each in lookups:
                each.forward = partial(_look_up, each, gradient)
            num_found += 1
    return num_found


def _is_plain(lookup: nn.Embedding) -> bool:
    """Tell whether `lookup` is no subclass, has its own forward and no option that changes its backward."""
    usual = type(lookup) is nn.Embedding and "forward" not in vars(lookup)
    return usual and lookup.max_norm is None and not (lookup.scale_grad_by_freq or lookup.sparse)


class TiedGradient:
    """Rows that one weight got in this backward, kept beside the dense gradient."""

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._rows: list[tuple[Tensor, Tensor]] = []  # pairs of ids and a row for each id
        self._earlier: Tensor | None = None  # the sum of earlier microbatches
        self._backward = NO_BACKWARD  # number of the backward that made the rows

    def __reduce__(self) -> tuple[Callable[..., TiedGradient], tuple[()]]:
        """Copy as an object without rows, which finds the weight of the copied model when that looks up."""
        return TiedGradient, ()

    def belongs_to(self, weight: Tensor) -> None:
        """Add rows to the gradients of `weight` from now on.

        An engine may put a parameter of its own in the place of the model's (FSDP2 does), so each forward says which
        weight it uses.
        """
        if self._weight is weight:
            return
        self._weight = weight
        # Autograd keeps the hook as long as the weight, so the hook itself must hold no weight.
        handle = weight.register_post_accumulate_grad_hook(partial(_add_rows, weakref.ref(self)))
        # Engines take the whole gradient in hooks of this kind, so this one has to be the first. Autograd calls them in
        # the order in which they were put into the dictionary, which `move_to_end` does not change.
        hooks = cast(dict[int, Any], weight._post_accumulate_grad_hooks)
        for number in [number for number in hooks if number != handle.id]:
            hooks[number] = hooks.pop(number)

    def keep(self, ids: Tensor, sums: Tensor) -> None:
        """Keep rows before autograd accumulates, and set the earlier sum aside.

        The dense gradient and the rows of one backward are thereby summed before the earlier sum is added.
        """
        weight, backward = self._weight, _number_of_backward()
        assert weight is not None
        if self._backward != backward:  # [Note: which backward]
            self._clear()
        if not self._rows:
            self._backward = backward
            self._earlier, weight.grad = weight.grad, None
        self._rows.append((ids, sums))

    def add_rows(self, weight: Tensor) -> None:
        """Add the rows to the dense gradient that autograd accumulated, and the result to the earlier sum."""
        if not self._rows or self._backward != _number_of_backward():
            return
        gradient = weight.grad
        if gradient is None:  # the head was not used in this backward
            gradient = torch.zeros_like(weight)
        for ids, sums in self._rows:
            gradient.index_add_(0, ids, sums)
        weight.grad = gradient if self._earlier is None else self._earlier.add_(gradient)
        self._clear()

    def _clear(self) -> None:
        self._rows.clear()
        self._earlier = None
        self._backward = NO_BACKWARD


def _number_of_backward() -> int:
    """Return the number that autograd gives the backward under way; torch.utils.checkpoint asks for it too."""
    return torch._C._current_graph_task_id()  # pyright: ignore[reportAttributeAccessIssue]


def _add_rows(gradient: weakref.ref[TiedGradient], weight: Tensor) -> None:
    owner = gradient()
    if owner is not None:
        owner.add_rows(weight)


def _look_up(module: nn.Embedding, gradient: TiedGradient, input: Tensor) -> Tensor:
    """Compute the forward of nn.Embedding, with rows kept apart where that saves memory."""
    weight = module.weight
    as_large = input.numel() >= module.num_embeddings  # rows would be as large as a dense tensor
    may_differentiate = weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()
    if as_large or not may_differentiate or torch.compiler.is_compiling():
        return embedding(input, weight, module.padding_idx)
    gradient.belongs_to(weight)
    return _LookUp.apply(weight, input, module.padding_idx, gradient)


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
