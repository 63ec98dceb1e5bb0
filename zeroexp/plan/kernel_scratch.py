"""The memory that kernels of a CPU allocate for themselves while they run, which no tensor shows.

Fake tensors run no kernel, so a rehearsal would miss it. torch's allocator counts it in a run:

    a product with a narrow result   oneDNN sums in fp32 and rounds at the end: 4 bytes for each element
    norms in a wider dtype           each tensor in turn is copied in that dtype, so that the largest decides
    the mean squared error           the squares, before they are summed

These were measured on a CPU without bf16 instructions. Smaller ones are left out, as the blocks of attention.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")}
GROUPED_PRODUCT = "aten::_grouped_mm"
SUM_BYTES = 4  # of one element of a product, while it is summed


class KernelScratch(TorchDispatchMode):
    """Lets `Storages`, the mode outside of this one, see what a kernel allocates beside its results."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes back with the local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if num_bytes := _scratch_bytes(func._schema.name, args, kwargs, result):
            torch.empty(num_bytes, dtype=torch.uint8)  # it dies at once, beside the results
        return result


def _scratch_bytes(name: str, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    if name in PRODUCTS:
        # Experts multiply one after another: one weight's gradient at a time, but all rows may be those of one expert.
        turns = result.shape[0] if name == GROUPED_PRODUCT and result.dim() == 3 else 1
        return SUM_BYTES * result.numel() // turns if result.itemsize < SUM_BYTES else 0
    if name == "aten::_foreach_norm":
        tensors: list[Tensor] = args[0]
        wider = kwargs.get("dtype")
        copied = [each.numel() for each in tensors if wider not in (None, each.dtype)]
        return max(copied, default=0) * wider.itemsize if wider else 0
    return args[0].nbytes if name == "aten::mse_loss" else 0
