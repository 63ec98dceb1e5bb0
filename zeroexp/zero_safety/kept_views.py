"""Views of gathered parameters that somebody keeps after the parameters were freed.

Nothing can make such a view raise when it is read: it is a plain tensor, which shows the weights as they were, and not
those that training makes of them. But every tensor counts as a use of its storage, and a unit knows how many uses are
its own (`FullStorage.is_viewed`). If there are more at the end of a microbatch, somebody has kept a view.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from zeroexp.zero.engine import Engine
from zeroexp.zero.full_storage import FullStorage
from zeroexp.zero.held import GatherState, Held
from zeroexp.zero.observer import Observer
from zeroexp.zero.unit import Unit


class KeptViews(Observer):
    """The views of full parameters that outlive a module's forward, or a microbatch."""

    def built(self, engine: Engine) -> None:
        self._units = [unit for unit in engine.units if unit.is_sharded]
        self._of_graphs: set[Unit] = set()  # units of which checkpointing alone keeps views

    def showing(self, held: Held, *, there: bool) -> None:
        """Raise RuntimeError if memory that is to be freed was handed to NumPy, even for a moment: it stays then."""
        if there or held.full is None or held.full.untyped_storage().resizable():
            return
        raise RuntimeError(
            f"parameter {held.chunk.members[0].name}, or another of its unit, was read as a NumPy array, after which "
            "PyTorch can not free its memory: read a clone, or read it inside `with strategy.gathered():`"
        )

    def returned(self, unit: Unit, tensor: Tensor) -> None:
        if _is_view_of_freed(tensor, unit):
            raise RuntimeError(
                f"{unit} returns a view of its parameters (shape {list(tensor.shape)}), which are freed when "
                "its module has run: return a clone, or make it part of a larger unit"
            )

    def end_microbatch(self, *, last: bool) -> None:
        """Raise RuntimeError if a view of parameters that are freed now is still alive."""
        for unit in self._units:
            freed = _freed_storage(unit)
            if freed is None or not freed.is_viewed:
                self._of_graphs.discard(unit)
            elif unit not in self._of_graphs:
                _refuse(unit, freed)
                self._of_graphs.add(unit)


def _refuse(unit: Unit, storage: FullStorage) -> None:
    """Raise unless only checkpointing keeps such views: it drops them with the graph they belong to.

    A view in garbage is kept by nobody, whether or not this rank has collected it yet.
    """
    if _kept_shape(storage) is None:
        return
    gc.collect()
    shape = _kept_shape(storage)
    if shape is not None:
        raise RuntimeError(
            f"a view of parameters of {unit} outlives the module's forward (shape {shape}): clone what is kept "
            "of weights, or read them inside `with strategy.gathered():`; hooks on saved tensors of your "
            "own are to be entered before this microbatch"
        )


def _kept_shape(storage: FullStorage) -> list[int] | None:
    """Return the shape of a view of the storage that is neither the engine's nor checkpointing's."""
    known = {id(each) for each in storage.own_views()} | _of_checkpointing()
    kept = (t for t in _living(Tensor) if id(t) not in known and _storage_of(t) == storage.address)
    return next((list(each.shape) for each in kept), None)


def _freed_storage(unit: Unit) -> FullStorage | None:
    return unit.full if unit.gather_state is GatherState.FREED else None


def _is_view_of_freed(tensor: Tensor, unit: Unit) -> bool:
    """Tell whether `tensor` is no parameter and lies in the memory of the unit's freed parameters."""
    freed = _freed_storage(unit)
    if freed is None:
        return False
    if isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    while is_functorch_wrapped_tensor(tensor):  # inside of a transform of torch.func
        tensor = get_unwrapped(tensor)
    return _storage_of(tensor) == freed.address


def _of_checkpointing() -> set[int]:
    """Return ids of tensors that torch.utils.checkpoint recomputed and keeps for a backward that may not come."""
    from torch.utils.checkpoint import _CheckpointFrame  # pyright: ignore[reportPrivateUsage]

    frames = list(_living(_CheckpointFrame))
    return {id(t) for frame in frames for kept in frame.recomputed.values() for t in kept.values()}


def _living(kind: type[Any]) -> Iterator[Any]:
    """Yield all objects of this kind. `isinstance` would ask the objects themselves, and a dead weak proxy raises."""
    return (each for each in gc.get_objects() if issubclass(type(each), kind))


def _storage_of(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # the tensor has no storage
        return None
