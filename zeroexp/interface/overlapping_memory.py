"""Parameters that share memory with what an engine does not move: it would show their first values for ever."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from itertools import chain
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MOST_OBJECTS = 1_000_000  # that are looked at in a model, whose attributes may lead to anything
LEADS_EVERYWHERE = (type, ModuleType, FrameType)


class _Extent(NamedTuple):
    """Where a tensor's bytes begin and end in its storage, and those of each element."""

    storage: int
    start: int
    stop: int
    is_other: bool  # than a parameter
    name: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Numpy compares addresses, and reads nothing there."""
        strided = {"shape": self.shape, "strides": self.strides, "typestr": f"|V{self.itemsize}"}
        return {**strided, "data": (self.start + 1, True), "version": 3}


def refuse_overlaps(module: nn.Module) -> None:
    """Raise ValueError for a parameter that shares memory with another, a buffer or an attribute: they would part.

    Parameters are moved to memory of their own.
    """
    parameters = [("parameter", name, each) for name, each in module.named_parameters()]
    buffers = [("buffer", name, each) for name, each in module.named_buffers()]
    known = {id(each) for _, _, each in (*parameters, *buffers)}
    attributes = (each for each in _attributes(module) if id(each[2]) not in known)
    extents = [*filter(None, (_extent(*each) for each in chain(parameters, buffers, attributes)))]
    moved = {each.storage for each in extents if not each.is_other}
    before: list[_Extent] = []  # what reaches into the next one's bytes
    for each in sorted(e for e in extents if e.storage in moved):
        before = [e for e in before if e.storage == each.storage and e.stop > each.start]
        for other in before:
            is_moved = not (other.is_other and each.is_other)
            if is_moved and np.shares_memory(np.asarray(other), np.asarray(each)):
                raise ValueError(
                    f"{other.name} and {each.name} lie in the same memory: make them one parameter, a view in "
                    "forward, or a clone"
                )
        before.append(each)


def _attributes(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors that attributes of modules lead to, the nearest first.

    Those that a pre-hook (spectral_norm) makes anew are left out. No code of the objects runs.
    """
    seen, found = set[int](), deque[tuple[str, Any]]()
    for prefix, each in module.named_modules():
        seen.add(id(each))
        made = [getattr(hook, "name", None) for hook in each._forward_pre_hooks.values()]
        # Of recurrent cells: made anew in forward, or the weights themselves.
        made += ["_flat_weights"] * isinstance(each, nn.RNNBase)
        own = vars(each).items()
        found += (
            (f"{prefix}.{name}".lstrip("."), value) for name, value in own if name not in made
        )
    most = len(found) + MOST_OBJECTS
    while found and len(seen) < most:
        name, each = found.popleft()
        if id(each) in seen or issubclass(type(each), LEADS_EVERYWHERE):
            continue
        seen.add(id(each))
        if issubclass(type(each), Tensor):
            yield "attribute", name, each
        else:
            found += ((name, inner) for inner in _inside(each) if gc.is_tracked(inner))


def _inside(value: Any) -> list[Any]:
    """Return what an object refers to; of a function all but its module's globals."""
    if type(value) is FunctionType:
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return gc.get_referents(value)


def _extent(kind: str, name: str, tensor: Tensor) -> _Extent | None:
    """Return where a tensor lies; None where it has no elements, or no storage with strides."""
    try:
        if is_traceable_wrapper_subclass(tensor) or not tensor.numel():
            return None
        storage, strides = tensor.untyped_storage()._cdata, tensor.stride()
    except (NotImplementedError, RuntimeError):
        return None  # nested, sparse, or of a transformation by functorch
    size, shape = tensor.itemsize, tuple(tensor.shape)
    start, steps = int(tensor.storage_offset()) * size, tuple(each * size for each in strides)
    stop = start + size + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    return _Extent(storage, start, stop, kind != "parameter", f"{kind} {name}", size, shape, steps)
