"""What functions of torch read of a tensor: its shape, its gradient, nothing, or else its values.

parameter_guards.py and piece_guards.py ask them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


def _setter(name: str) -> Any:
    return getattr(Tensor, name).__set__


def _deleter(name: str) -> Any:
    return getattr(Tensor, name).__delete__


def _contiguous_stride(shape: torch.Size, dim: int | None = None) -> tuple[int, ...] | int:
    strides = tuple(shape[i + 1 :].numel() for i in range(len(shape)))
    return strides if dim is None else strides[dim]


# These answer by the shape that a freed parameter has when its values are there.
OF_SHAPE: dict[Any, Callable[..., Any]] = {
    Tensor.stride: _contiguous_stride,
    Tensor.is_contiguous: lambda shape, memory_format=None: True,
}

# `model.to(...)` and its like call these on every parameter.
_CONVERSIONS = "to cpu cuda float double half bfloat16 type_as"
CONVERSIONS = {getattr(Tensor, name) for name in _CONVERSIONS.split()}

GET_DATA, SET_DATA, GET_DEVICE = _getter("data"), _setter("data"), _getter("device")

OF_GRADIENT = {_getter("grad"), _setter("grad"), _deleter("grad")}

# These need neither values nor gradient: what a tensor is, and another one of its shape, dtype or device.
_PROPERTIES = """
    shape ndim dtype device layout names itemsize nbytes requires_grad retains_grad grad_dtype is_leaf grad_fn
    output_nr _version _backward_hooks _post_accumulate_grad_hooks is_nested is_sparse is_sparse_csr is_quantized
    is_mkldnn is_cuda is_cpu is_meta is_mps is_xpu is_maia is_ipu is_xla is_vulkan is_mtia
"""
_METHODS = """
    size dim ndimension numel nelement __len__ new_zeros new_ones new_empty new_full
    requires_grad_ is_floating_point is_complex is_signed element_size get_device
    register_hook retain_grad register_post_accumulate_grad_hook __hash__
"""
_FUNCTIONS = """
    zeros_like ones_like empty_like full_like rand_like randn_like numel is_floating_point is_complex
"""
HARMLESS = {
    *(_getter(name) for name in _PROPERTIES.split() if hasattr(Tensor, name)),
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *map(_setter, ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")),
    *(getattr(torch, name) for name in _FUNCTIONS.split()),
    torch._has_compatible_shallow_copy_type,  # `model.to(...)` calls it
}
