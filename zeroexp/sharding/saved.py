"""Autograd saves places of gathered parameters instead of their values, and backward finds the values again.

Autograd keeps the weights that backward needs as views of the memory they were gathered into. When backward runs, the
unit has been freed, and another unit may lie there. So `pack` replaces each saved view of gathered memory by its place
in the unit. When backward asks for the view, `unpack` gathers the unit if need be and makes the view again. This is
right however backward gets there, whatever form a module's output had, and in a second backward through the first.

Tensors that are no parameters are saved unchanged.

[Note: raw views] What is recomputed under `torch.utils.checkpoint(use_reentrant=False)` does not pass through these
hooks, since checkpointing's own hooks come first. Backward uses those views while the unit stays in the memory in which
it was recomputed (gathers.py: `note_recomputed`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zeroexp.sharding.pools import Store
from zeroexp.sharding.unit import Unit


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SavedView:
    """A place describes a view of a unit's full parameters: which elements, in which shape."""

    unit: Unit
    generation: int  # generation of the weights when they were saved
    # The parameter, where a parameter itself was saved; the fields after it describe any other view.
    parameter: nn.Parameter | None = None
    chunk: int = 0
    offset_bytes: int = 0  # offset in the chunk's full tensor
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


class SavedWeights:
    """`pack` and `unpack` are the two hooks for `torch.autograd.graph.saved_tensors_hooks`."""

    def __init__(self, units: Iterable[Unit], make_ready: Callable[[Unit], None]):
        """`make_ready` gathers the parameters of a unit if they are not there, and waits for them."""
        self._units = list(units)
        self._make_ready = make_ready
        self._unit_of = {p: unit for unit in self._units for p in unit.parameters()}
        self._stores: dict[int, Store] = {}
        # Autograd drops a place once the node that saved it has had its backward. Only the root's are counted.
        self._of_root: WeakSet[SavedView] = WeakSet()
        self.find_memory()

    def find_memory(self) -> None:
        """Look again where the units' full parameters lie; called when a unit has moved."""
        self._chunk_offsets = {unit: list(_offsets_of_chunks(unit)) for unit in self._units}
        self._stores = {
            tensors.full.untyped_storage()._cdata: unit.store
            for unit in self._units
            for tensors in unit.chunks
            if tensors.full is not None and unit.store is not None
        }

    def sees_what_is_saved(self) -> bool:
        """Tell whether autograd calls these hooks for what it saves now, and not somebody else's."""
        autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
        top = autograd._top_saved_tensors_default_hooks(False)
        return top is not None and top[0] == self.pack

    def pack(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return tensor
        if isinstance(tensor, nn.Parameter):
            unit = self._unit_of.get(tensor)
            return (
                tensor if unit is None else self._counted(SavedView(unit, unit.generation, tensor))
            )
        try:
            store = self._stores.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError) as error:
            raise RuntimeError(
                "autograd saves a tensor without memory of its own (a transform of torch.func, forward mode) while "
                "weights rest sharded: run it inside `with strategy.gathered():` outside of a microbatch, or use zero2"
            ) from error
        if store is None:
            return tensor
        unit = store.tenant
        if not isinstance(unit, Unit):
            raise RuntimeError(
                f"a view of freed parameters is used, of shape {list(tensor.shape)}: the module that holds them has "
                "ended; clone what is to be used later, or use it inside `with strategy.gathered():`"
            )
        return self._counted(self._saved_view(tensor, unit))

    def _counted(self, place: SavedView) -> SavedView:
        if place.unit.is_root:
            self._of_root.add(place)
        return place

    def needs_root(self) -> bool:
        """Tell whether a backward that is still to come has saved weights of the root."""
        return any(place.generation == place.unit.generation for place in self._of_root)

    def _saved_view(self, tensor: Tensor, unit: Unit) -> SavedView:
        """Return the place of a view of the unit's full parameters."""
        offset = int(tensor.storage_offset()) * tensor.itemsize
        offsets = self._chunk_offsets[unit]
        chunk = bisect_right(offsets, offset) - 1
        return SavedView(
            unit,
            unit.generation,
            None,
            chunk,
            offset - offsets[chunk],
            tensor.size(),
            tensor.stride(),
            tensor.dtype,
        )

    def unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, SavedView):
            return kept
        unit = kept.unit
        if unit.generation != kept.generation:
            raise RuntimeError(
                f"{unit}: backward needs weights that an optimizer step has changed since the forward; run backward "
                "before strategy.step()"
            )
        self._make_ready(unit)
        if kept.parameter is not None:
            return kept.parameter
        full = unit.chunks[kept.chunk].full
        assert full is not None
        typed = full.view(kept.dtype)
        start = typed.storage_offset() + kept.offset_bytes // kept.dtype.itemsize
        return typed.as_strided(kept.size, kept.stride, start)


def _offsets_of_chunks(unit: Unit) -> Iterator[int]:
    """Yield at which byte of the unit's memory each chunk begins."""
    for tensors in unit.chunks:
        if tensors.full is not None:
            yield int(tensors.full.storage_offset()) * tensors.full.itemsize
