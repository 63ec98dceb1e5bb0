"""Modules that compute in a dtype of their own, such as norms or routers in float32 inside of a bfloat16 model.

Their parameters are gathered in it. What they are given is cast to it, and what they return to that of the module
around them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zeroexp.zero.grouping import outer_names
from zeroexp.zero.options import Dtypes


def cast_at_borders(model: nn.Module, dtypes: Dtypes) -> None:
    """Cast floating-point tensors that modules of `dtypes.of_modules` are given, and return. A copy casts nothing."""
    own = dtypes.of_modules
    for name, dtype in own.items():
        around = [own[outer] for outer in outer_names(name) if outer in own]
        _cast_at(model.get_submodule(name), dtype, [dtypes.compute, *around][-1])


def _cast_at(module: nn.Module, own: torch.dtype, outside: torch.dtype) -> None:
    def before(called: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), own) if called is module else None

    def after(called: nn.Module, _args: Any, output: Any) -> Any:
        return _cast(output, outside) if called is module else None

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, tree)
