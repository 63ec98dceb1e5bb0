"""The memory that kernels of a CPU allocate for themselves while they run, which no tensor shows.

Fake tensors run no kernel, so a rehearsal would miss it. torch's allocator counts it in a run:

    a product with a bf16 result     on some CPUs oneDNN sums in fp32 and rounds at the end: `ProductScratch`
    norms in a wider dtype           each tensor in turn is copied in that dtype, so that the largest decides
    the mean squared error           the squares, before they are summed

Smaller ones are left out: the blocks of attention, and those into which oneDNN packs the operands of a product, which
do not grow with it (1.4 MB for each thread, on a CPU with bf16 instructions).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.plan.local_operations import LocalOperations

PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")}
GROUPED_PRODUCT = "aten::_grouped_mm"
SUM_BYTES = 4  # of one element of a product, while it is summed
# The words of ONEDNN_MAX_CPU_ISA with which a CPU of more instructions does as one of AVX512 without those for bf16.
WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
MEASURED_ROWS = (512, 1024)  # of square results, far above the blocks of a kernel


@dataclass(frozen=True)
class ProductScratch:
    """Bytes that a bf16 product of a CPU allocates for each element of its result, and how they are known."""

    bytes_per_element: int
    source: str

    def __str__(self) -> str:
        return f"bf16 products sum in {self.bytes_per_element or 'no'} bytes more for each element, {self.source}"


def prior_product_scratch() -> ProductScratch:
    """Return what this CPU's instructions say, and ONEDNN_MAX_CPU_ISA, by which oneDNN leaves some of them out.

    oneDNN multiplies bf16 where there is AVX512. With instructions for bf16 it rounds each block as it is summed;
    without them it sums all of the result in fp32 first. Elsewhere torch multiplies itself, in place.
    """
    word = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    by_onednn = torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_avx512_supported()
    rounds = torch.cpu._is_avx512_bf16_supported() and word.upper() not in WITHOUT_BF16
    return ProductScratch(
        SUM_BYTES if by_onednn and not rounds else 0, "by this CPU's instructions"
    )


def measure_product_scratch() -> int | None:
    """Return the bytes of `ProductScratch`, from two real products; None where allocations can not be counted.

    The difference of both leaves out blocks whose size does not depend on the result.
    """
    if count_cpu_allocations():
        return None
    small, large = (_scratch_of_product(rows) for rows in MEASURED_ROWS)
    return round((large - small) / (MEASURED_ROWS[1] ** 2 - MEASURED_ROWS[0] ** 2))


def _scratch_of_product(rows: int) -> int:
    left, right = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((rows, 64), (64, rows)))
    result = left @ right
    meter = AllocationMeter(left.device)
    before = meter.peak_bytes()
    torch.mm(left, right, out=result)
    peak = meter.peak_bytes()
    assert before is not None and peak is not None
    return peak - before


class KernelScratch(LocalOperations):
    """Lets `Storages`, the mode outside of this one, see what a kernel allocates beside its results."""

    def __init__(self, product: ProductScratch) -> None:
        super().__init__()
        self._product = product

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if num_bytes := self._scratch_bytes(func._schema.name, args, kwargs, result):
            torch.empty(num_bytes, dtype=torch.uint8)  # it dies at once, beside the results
        return result

    def _scratch_bytes(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> int:
        if name in PRODUCTS:
            # Experts multiply one after another: one weight's gradient at a time, but one expert may have all rows.
            turns = result.shape[0] if name == GROUPED_PRODUCT and result.dim() == 3 else 1
            each = self._product.bytes_per_element if result.dtype is torch.bfloat16 else 0
            return each * result.numel() // turns
        if name == "aten::_foreach_norm":
            tensors: list[Tensor] = args[0]
            wider = kwargs.get("dtype")
            copied = [each.numel() for each in tensors if wider not in (None, each.dtype)]
            return max(copied, default=0) * wider.itemsize if wider else 0
        return args[0].nbytes if name == "aten::mse_loss" else 0
