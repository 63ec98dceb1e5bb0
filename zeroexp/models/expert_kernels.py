"""Fused experts: modules of transformers that keep all experts in one matrix and multiply by it in one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeroexp.config.keys import ConfigError

ROW_BYTES = 16  # torch's grouped product takes matrices whose rows are a multiple of this


def check_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise ConfigError if fused experts of `model`, computed in `dtype`, have sizes that torch can not multiply."""
    multiple = ROW_BYTES // dtype.itemsize
    for module in model.modules():
        shape: Any = getattr(module, "config", None)
        if not hasattr(module, "is_concatenated") or shape._experts_implementation != "grouped_mm":
            continue
        matrices = [each for each in module.parameters(recurse=False) if each.ndim == 3]
        for size in (size for each in matrices for size in each.shape[-2:]):
            if size % multiple:
                kind = str(dtype).removeprefix("torch.")
                problem = (
                    f"torch multiplies no fused experts whose rows end inside {ROW_BYTES} bytes"
                )
                remedy = f"use a multiple of {multiple}, {ROW_BYTES} bytes of {kind}"
                raise ConfigError(f"{_named(shape.to_dict(), size)}: {problem}; {remedy}")


def multiply_one_by_one(model: nn.Module) -> None:
    """Let fused experts of `model` be multiplied one after the other: torch's grouped product takes no float64."""
    for module in model.modules():
        if hasattr(module, "is_concatenated"):
            shape: Any = module.config
            shape._experts_implementation = "eager"


def _named(keys: dict[str, Any], size: int) -> str:
    """Name the key that is a size of an expert; the halves of its first matrix lie side by side."""
    sizes = {key: value for key, value in keys.items() if key.endswith(("_size", "_dim"))}
    for key, value in sizes.items():
        if value in (size, size / 2):
            return f"model.hf_config.{key}={value}"
    return f"model.hf_config: an expert of size {size}"
