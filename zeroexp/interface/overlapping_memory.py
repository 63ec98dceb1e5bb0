"""Parameters that share memory with what an engine does not move: it would show their first values for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MOST_OBJECTS = 100_000  # that are looked at in one attribute, which may lead to anything
# What a value leads to, and does not keep: modules have attributes of their own. A dead proxy can not even be asked.
NOT_INSIDE = (nn.Module, ModuleType, type, str, bytes, int, float, *ProxyTypes)
EMPTY_CELL = CellType()


def refuse_overlaps(module: nn.Module) -> None:
    """Raise ValueError for a parameter that shares memory with another, a buffer or an attribute: they would part.

    Parameters are moved to memory of their own.
    """
    parameters = [("parameter", name, each) for name, each in module.named_parameters()]
    buffers = [("buffer", name, each) for name, each in module.named_buffers()]
    known = {id(each) for _, _, each in (*parameters, *buffers)}
    attributes = (each for each in _attributes(module) if id(each[2]) not in known)
    ends = sorted(
        (*_extent(each), kind != "parameter", f"{kind} {name}")
        for kind, name, each in (*parameters, *buffers, *attributes)
        if each.layout is torch.strided and each.numel()
    )
    reached: dict[bool, tuple[int, int, str]] = {}  # is no parameter -> what reaches furthest
    for storage, start, stop, is_other, what in ends:
        for others in (False, True):
            before = reached.get(others)
            if (is_other and others) or before is None or before[0] != storage:
                continue
            if start < before[1]:
                raise ValueError(
                    f"{before[2]} and {what} lie in the same memory: make them one parameter, a view in forward, or "
                    "a clone"
                )
        if is_other not in reached or reached[is_other][:2] < (storage, stop):
            reached[is_other] = storage, stop, what


def _attributes(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors in attributes of modules, but for those that a pre-hook (spectral_norm) makes anew."""
    for prefix, each in module.named_modules():
        made = [getattr(hook, "name", None) for hook in each._forward_pre_hooks.values()]
        # Of recurrent cells: made anew in forward, or the weights themselves.
        made += ["_flat_weights"] * isinstance(each, nn.RNNBase)
        for name in (name for name in vars(each) if name not in made):
            leaves = _tensors_in(vars(each)[name])
            what = "attribute", f"{prefix}.{name}".lstrip(".")
            yield from ((*what, leaf) for leaf in leaves if not is_traceable_wrapper_subclass(leaf))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a value is, or leads to."""
    seen: dict[int, Any] = {}
    found = [value]
    while found and len(seen) < MOST_OBJECTS:
        each = found.pop()
        if id(each) in seen or issubclass(type(each), NOT_INSIDE):
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            yield each
        else:
            found += _inside(each)


def _inside(value: Any) -> Iterable[Any]:
    """Return what a container holds, a function encloses, or a plain object has in its attributes."""
    if isinstance(value, dict):  # another mapping may refuse, as a config of which a key is missing
        return dict.values(value)
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, FunctionType):
        return (each.cell_contents for each in value.__closure__ or () if each != EMPTY_CELL)
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """Return the storage of a tensor, and where in it the tensor's bytes begin and end."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage()._cdata, start, start + (1 + reach) * tensor.itemsize
