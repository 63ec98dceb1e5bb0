"""Parameters, gradients and master weights each have a dtype of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Dtypes:
    """The strategy's table names these three dtypes."""

    compute: torch.dtype  # dtype of parameters and of the gradients autograd makes
    # dtype of gradients on the wire, of sums of microbatches, and of what reduction leaves
    reduce: torch.dtype
    master: torch.dtype  # dtype of the weights the optimizer updates


def own_dtypes(module: nn.Module) -> Dtypes:
    """Return the model's own dtype for all uses; ValueError if its parameters have several."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) > 1:
        words = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(
            f"parameters of {words}: say what they are to become with dtypes=Dtypes(...)"
        )
    dtype = dtypes.pop() if dtypes else torch.float32
    return Dtypes(dtype, dtype, dtype)
