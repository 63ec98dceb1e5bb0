"""Autograd saves places of gathered parameters instead of their values, and backward finds the values again.

Between forward and backward a unit is freed. So `pack` replaces each saved view of a unit's full parameters by its
place in their storage. When backward asks for the view, `unpack` gathers the unit if need be and makes the view again.
This is right however backward gets there, whatever form a module's output had, and in a second backward through the
first. Tensors of other memory are saved unchanged.

[Note: raw views] What is recomputed under `torch.utils.checkpoint(use_reentrant=False)` does not pass through these
hooks, since checkpointing's own hooks come first. It keeps views, which keep the unit's bytes until backward has used
them (unit.py, [Note: one storage]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zeroexp.sharding.state import Residence
from zeroexp.sharding.unit import Unit


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SavedView:
    """The place of a view in the storage of a unit's full parameters."""

    unit: Unit
    generation: int  # generation of the weights when they were saved
    # The parameter, where a parameter itself was saved; the fields after it describe any other view.
    parameter: nn.Parameter | None = None
    dtype: torch.dtype = torch.float32
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0  # in elements


class SavedWeights:
    """`pack` and `unpack` are the two hooks for `torch.autograd.graph.saved_tensors_hooks`."""

    def __init__(self, units: Iterable[Unit], make_ready: Callable[[Unit], None]):
        """`make_ready` gathers the parameters of a unit if they are not there, and waits for them."""
        self._make_ready = make_ready
        self._unit_of = {p: unit for unit in units for p in unit.parameters()}
        self._unit_at = {unit.storage: unit for unit in units}
        # Autograd drops a place once the node that saved it has had its backward. Only the root's are counted.
        self._of_root: WeakSet[SavedView] = WeakSet()

    def pack(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return tensor
        if isinstance(tensor, nn.Parameter):
            unit = self._unit_of.get(tensor)
            saved = None if unit is None else SavedView(unit, unit.generation, tensor)
        else:
            saved = self._place_of(tensor)
        if saved is None:
            return tensor
        if saved.unit.is_root:
            self._of_root.add(saved)
        return saved

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
        assert unit.memory is not None
        return unit.memory.view(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)

    def needs_root(self) -> bool:
        """Tell whether a backward that is still to come has saved weights of the root."""
        return any(place.generation == place.unit.generation for place in self._of_root)

    def _place_of(self, tensor: Tensor) -> SavedView | None:
        """Return the place of a view of full parameters; None for a tensor of other memory."""
        try:
            unit = self._unit_at.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError) as error:
            raise RuntimeError(
                "autograd saves a tensor without memory of its own (a transform of torch.func, forward mode) while "
                "weights rest sharded: run it inside `with strategy.gathered():` outside of a microbatch, or use zero2"
            ) from error
        if unit is None:
            return None
        if unit.residence is Residence.FREED:
            raise RuntimeError(
                f"a view of freed parameters is used, of shape {list(tensor.shape)}: the module that holds them has "
                "ended; clone what is to be used later, or use it inside `with strategy.gathered():`"
            )
        offset = int(tensor.storage_offset())
        size, stride = tensor.size(), tensor.stride()
        return SavedView(unit, unit.generation, None, tensor.dtype, size, stride, offset)
