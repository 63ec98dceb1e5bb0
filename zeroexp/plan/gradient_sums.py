"""Autograd adds the gradients of a tensor that is used twice: in place where nobody but it holds the first of them.

With fake tensors it never adds in place, since it does not know what a subclass of tensors makes of that. A rehearsal
would hold one gradient more than a run, of a tied embedding under autocast for one, so the sum is made here as autograd
makes it of real tensors. A view holds the tensor that it shows, so a gradient that is a view is not added to in place.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false

from __future__ import annotations

import sys
from typing import Any

import torch

from zeroexp.plan.local_operations import LocalOperations

ADD = torch.ops.aten.add.Tensor


class GradientSums(LocalOperations):
    """Adds in place where autograd would. Enter it last: a mode inside of it would hold the operands as well."""

    def __init__(self) -> None:
        super().__init__()
        # So many references lead to a gradient that autograd alone holds, while it is added to.
        self._of_autograd_alone: tuple[int, ...] | None = None

    def __enter__(self) -> GradientSums:
        super().__enter__()
        with torch.enable_grad():
            weight = torch.zeros(1, requires_grad=True)
            (weight * 2 + weight * 3).backward()  # the first sum, whose gradients nobody else holds
        assert self._of_autograd_alone is not None
        return self

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is ADD and _is_in_backward():
            references = _references(args[0])
            if self._of_autograd_alone is None:
                self._of_autograd_alone = references
            if references == self._of_autograd_alone:
                return args[0].add_(args[1])
        return func(*args, **kwargs)


def _is_in_backward() -> bool:
    return bool(torch._C._current_autograd_node()) and not torch.is_grad_enabled()


def _references(tensor: Any) -> tuple[int, ...]:
    """Return how many references lead to the tensor from Python, to it from C++, and to its storage."""
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), storage
