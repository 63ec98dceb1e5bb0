"""Memory that fake tensors do not show: what gloo copies, what kernels of a CPU allocate, how autograd adds gradients.

Fake tensors run no kernel and no backend. Each mode below sees every operation on the tensors of one rank and
allocates, or adds, what torch does with real ones, so that `Storages` counts it.

[Note: gloo] ProcessGroupGloo reduces a copy of the input of a reduce-scatter, and gathers into a copy of the output of
an all-gather. torch allocates both; they live as long as the collective. A rehearsal has them when it is issued, since
torch's engines do not tell when they wait for it. A thread of gloo that finds no free core may hold one longer; no
rehearsal has that.

[Note: scratch] torch's allocator counts what kernels of a CPU allocate while they run:

    a product with a bf16 result     on some CPUs oneDNN sums in fp32 and rounds at the end: `product_scratch_bytes`
    norms in a wider dtype           each tensor in turn is copied in that dtype, so that the largest decides
    the mean squared error           the squares, before they are summed

Smaller ones are left out: the blocks of attention, and those into which oneDNN packs the operands of a product, which
do not grow with it (1.4 MB for each thread, on a CPU with bf16 instructions).

[Note: sums] Autograd adds the gradients of a tensor that is used twice: in place where nobody but it holds the first of
them. With fake tensors it never does, since it does not know what a subclass of tensors makes of that, so the sum is
made here. A view holds the tensor that it shows, so a gradient that is a view is not added to in place.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor

from zeroexp.plan.storages import MESSAGES, LocalOperations, Storages

# Collective -> which of its arguments gloo copies.
COPIED = {"c10d::_reduce_scatter_base_": 1, "c10d::_allgather_base_": 0}
PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")}
GROUPED_PRODUCT = "aten::_grouped_mm"
ADD = torch.ops.aten.add.Tensor
SUM_BYTES = 4  # of one element of a product, while it is summed
# The words of ONEDNN_MAX_CPU_ISA with which a CPU of more instructions does as one of AVX512 without those for bf16.
WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")


def product_scratch_bytes() -> int:
    """Return what a bf16 product allocates for each element of its result, by this CPU's instructions.

    oneDNN multiplies bf16 where there is AVX512. With instructions for bf16 it rounds each block as it is summed;
    without them, or where ONEDNN_MAX_CPU_ISA leaves them out, it sums all of the result in fp32 first. Elsewhere torch
    multiplies itself, in place.
    """
    word = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    by_onednn = torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_avx512_supported()
    rounds = torch.cpu._is_avx512_bf16_supported() and word.upper() not in WITHOUT_BF16
    return SUM_BYTES if by_onednn and not rounds else 0


class HostMemory(LocalOperations):
    """Lets `storages`, the mode outside of this one, see what gloo copies and what kernels allocate."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages
        self._product_bytes = product_scratch_bytes()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if name in COPIED:
            copy = torch.empty_like(args[COPIED[name]])  # lives until the collective is issued
            self._storages.assign_kind(MESSAGES, [copy])
        result = func(*args, **kwargs)
        if num_bytes := self._scratch_bytes(name, args, kwargs, result):
            torch.empty(num_bytes, dtype=torch.uint8)  # it dies at once, beside the results
        return result

    def _scratch_bytes(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> int:
        if name in PRODUCTS:
            # Experts multiply one after another: one weight's gradient at a time, but one expert may have all rows.
            turns = result.shape[0] if name == GROUPED_PRODUCT and result.dim() == 3 else 1
            each = self._product_bytes if result.dtype is torch.bfloat16 else 0
            return each * result.numel() // turns
        if name == "aten::_foreach_norm":
            tensors: list[Tensor] = args[0]
            wider = kwargs.get("dtype")
            copied = [each.numel() for each in tensors if wider not in (None, each.dtype)]
            return max(copied, default=0) * wider.itemsize if wider else 0
        return args[0].nbytes if name == "aten::mse_loss" else 0


class AutogradSums(LocalOperations):
    """Adds in place where autograd would. Enter it last: a mode inside of it would hold the operands as well."""

    def __init__(self) -> None:
        super().__init__()
        # So many references lead to a gradient that autograd alone holds, while it is added to.
        self._of_autograd_alone: tuple[int, ...] | None = None

    def __enter__(self) -> AutogradSums:
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
