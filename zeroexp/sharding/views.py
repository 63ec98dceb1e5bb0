"""Finds views of gathered parameters that somebody keeps when the parameters have been freed.

Nothing can make such a view raise when it is read: it is a plain tensor over memory that holds other weights by then.
But every tensor counts as a use of its storage, and how many uses the engine itself makes of it is known from the
beginning. Where there are more at the end of a microbatch, somebody has kept a view.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zeroexp.sharding.unit import Residence, Unit


class OwnViews:
    """How many tensors of the engine share each storage of gathered parameters."""

    def __init__(self, units: Iterable[Unit]):
        """The units are freed now, and nobody has seen their memory."""
        self._units = list(units)
        self._own = {s: _num_uses(s) for unit in self._units for s in _storages(unit)}

    @contextmanager
    def moving(self, unit: Unit) -> Iterator[None]:
        """Inside, the freed unit gets other memory."""
        before = {s: _num_uses(s) for s in _storages(unit)}
        yield
        for storage, uses in before.items():
            self._own[storage] -= uses - _num_uses(storage)
        self._own |= {s: _num_uses(s) for s in _storages(unit)}

    def refuse_others(self) -> None:
        """Raises RuntimeError where a view of parameters that are freed now is still alive."""
        for unit in self._units:
            if unit.residence is not Residence.FREED or unit.store is None or not unit.store.free:
                continue
            for storage in _storages(unit):
                uses = _num_uses(storage)
                if uses > self._own[storage]:
                    self._refuse(unit, storage)
                    self._own[storage] = uses

    def _refuse(self, unit: Unit, storage: int) -> None:
        """Unless only checkpointing has such views: it lets them go with the graph they belong to."""
        known = {id(t) for each in self._units for t in _own_tensors(each)} | _of_checkpointing()
        for each in gc.get_objects():
            if isinstance(each, Tensor) and id(each) not in known and _storage_of(each) == storage:
                raise RuntimeError(
                    f"a view of parameters of {unit}, or of a unit that shares its memory, outlives the module's "
                    f"forward (shape {list(each.shape)}): clone what is kept of weights, or read them inside "
                    "`with strategy.gathered():`"
                )


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
    """Tensors that torch.utils.checkpoint has recomputed and keeps for a backward that may not come."""
    from torch.utils.checkpoint import _CheckpointFrame  # pyright: ignore[reportPrivateUsage]

    frames = [each for each in gc.get_objects() if isinstance(each, _CheckpointFrame)]
    return {id(t) for frame in frames for kept in frame.recomputed.values() for t in kept.values()}


def _storages(unit: Unit) -> set[int]:
    full = [tensors.full for tensors in unit.chunks if tensors.full is not None]
    return {each.untyped_storage()._cdata for each in full}


def _storage_of(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a tensor without storage
        return None


def _num_uses(storage: int) -> int:
    return torch._C._storage_Use_Count(storage)
