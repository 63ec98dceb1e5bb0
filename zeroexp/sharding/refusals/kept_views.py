"""This file finds views of gathered parameters that somebody keeps after the parameters were freed.

Nothing can make such a view raise when it is read: it is a plain tensor over memory that may hold other weights by
then. But every tensor counts as a use of its storage, and the engine knows from the beginning how many uses are its
own. If there are more uses at the end of a microbatch, somebody has kept a view.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from zeroexp.sharding.state import Residence
from zeroexp.sharding.unit import Unit


class OwnViews:
    """This object counts the engine's own tensors over each storage of gathered parameters."""

    def __init__(self, units: Iterable[Unit]):
        """Count the engine's own views; the units must be freed, and nobody may have seen their memory yet."""
        self._units = list(units)
        self._own = {s: _num_uses(s) for unit in self._units for s in _storages(unit)}

    @contextmanager
    def recount_after_move(self, unit: Unit) -> Iterator[None]:
        """Correct the counts for a freed unit that gets other memory inside this context."""
        before = {s: _num_uses(s) for s in _storages(unit)}
        yield
        for storage, uses in before.items():
            self._own[storage] -= uses - _num_uses(storage)
        self._own |= {s: _num_uses(s) for s in _storages(unit)}

    def others_hold(self, unit: Unit) -> bool:
        """Tell whether anybody but the engine and the unit's parameters holds its gathered memory now."""
        (storage,) = _storages(unit)
        return _num_uses(storage) > self._own[storage] + len(list(unit.parameters()))

    def refuse_others(self) -> None:
        """Raise RuntimeError if a view of parameters that are freed now is still alive."""
        for unit in self._units:
            if (
                unit.residence is not Residence.FREED
                or unit.store is None
                or not unit.store.is_free
            ):
                continue
            for storage in _storages(unit):
                if _num_uses(storage) > self._own[storage]:
                    self._refuse(unit, storage)
                    self._own[storage] = _num_uses(storage)

    def _refuse(self, unit: Unit, storage: int) -> None:
        """Raise unless only checkpointing keeps such views: it drops them with the graph they belong to.

        A view in garbage is kept by nobody, whether or not this rank has collected it yet.
        """
        if self._kept_shape(storage) is None:
            return
        gc.collect()
        shape = self._kept_shape(storage)
        if shape is not None:
            raise RuntimeError(
                f"a view of parameters of {unit}, or of a unit that shares its memory, outlives the module's "
                f"forward (shape {shape}): clone what is kept of weights, or read them inside "
                "`with strategy.gathered():`"
            )

    def _kept_shape(self, storage: int) -> list[int] | None:
        """Return the shape of a view of this storage that is neither the engine's nor checkpointing's."""
        known = {id(t) for each in self._units for t in _own_tensors(each)} | _of_checkpointing()
        kept = (t for t in _living(Tensor) if id(t) not in known and _storage_of(t) == storage)
        return next((list(each.shape) for each in kept), None)


def is_view_of_freed(tensor: Tensor, unit: Unit) -> bool:
    """Tell whether `tensor` is no parameter and lies in the memory of the unit's freed parameters."""
    if unit.store is None or unit.residence is not Residence.FREED:
        return False
    if isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    while is_functorch_wrapped_tensor(tensor):  # inside of a transform of torch.func
        tensor = get_unwrapped(tensor)
    return _storage_of(tensor) in _storages(unit)


def _own_tensors(unit: Unit) -> Iterator[Tensor]:
    for tensors in unit.chunks:
        if tensors.full is not None:
            yield tensors.full
        yield from tensors.views
    for part in unit.gather_parts():
        if part.by_rank is not None:
            yield part.by_rank
    if unit.store is not None:
        yield unit.store.memory


def _of_checkpointing() -> set[int]:
    """Return ids of tensors that torch.utils.checkpoint recomputed and keeps for a backward that may not come."""
    from torch.utils.checkpoint import _CheckpointFrame  # pyright: ignore[reportPrivateUsage]

    frames = list(_living(_CheckpointFrame))
    return {id(t) for frame in frames for kept in frame.recomputed.values() for t in kept.values()}


def _living(kind: type[Any]) -> Iterator[Any]:
    """Yield all objects of this kind. `isinstance` would ask the objects themselves, and a dead weak proxy raises."""
    return (each for each in gc.get_objects() if issubclass(type(each), kind))


def _storages(unit: Unit) -> set[int]:
    full = [tensors.full for tensors in unit.chunks if tensors.full is not None]
    return {each.untyped_storage()._cdata for each in full}


def _storage_of(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # the tensor has no storage
        return None


def _num_uses(storage: int) -> int:
    return torch._C._storage_Use_Count(storage)
