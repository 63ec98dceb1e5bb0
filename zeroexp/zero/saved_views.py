"""What autograd saves of gathered parameters between forward and backward: their places.

[Note: saved places] Between forward and backward a unit is freed. So each saved view of a unit's full parameters is
kept as its place in their storage. When backward asks for the view, the unit is gathered if need be and the view made
again. This is right however backward gets there, whatever form a module's output had, and in a second backward through
the first. Of several engines whose microbatches are open at once, as of a GAN, the hooks of the one that was entered
last see all that autograd saves, so each looks for places in all of them. What is recomputed under
`torch.utils.checkpoint(use_reentrant=False)` does not pass through these hooks, since checkpointing's own hooks come
first. It keeps views, which keep the unit's bytes until backward has used them (full_storage.py, [Note: one storage]).

[Note: saved tensors] Anything else is saved detached: a node of the graph that kept its own output, which leads to the
node, would be a cycle that no collector sees, and a graph through which no backward runs (an unused output, a loss that
is skipped) would stay for good. Where there are such hooks autograd leaves it to them to notice that a tensor was
written since it was saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroexp.zero.held import GatherState
from zeroexp.zero.schedule import Schedule
from zeroexp.zero.unit import Unit


@dataclass(frozen=True, slots=True)
class SavedView:
    """The place of a view in the storage of a unit's full parameters."""

    schedule: weakref.ref[Schedule]
    unit: weakref.ref[Unit]
    generation: int  # generation of the weights when they were saved
    # The parameter, where a parameter itself was saved; the fields after it describe any other view.
    parameter: nn.Parameter | None = None
    dtype: torch.dtype = torch.float32
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0  # in elements
    # Whether torch reads the elements as conjugates, or as negatives, of what lies there.
    is_conj: bool = False
    is_neg: bool = False


class SavedTensor(NamedTuple):
    """Another tensor that autograd saved, see [Note: saved tensors]."""

    tensor: Tensor
    version: int  # how often it had been written


class SavedViews:
    """What autograd saves of the parameters of one engine, see [Note: saved places]."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        units = schedule.gathers.sharded
        self._unit_of = {p: unit for unit in units for p in unit.parameters}
        self._unit_at = {unit.full.address: unit for unit in units if unit.full is not None}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Have autograd save places of gathered parameters inside, instead of their values."""
        if not self._unit_at:
            yield
            return
        _open.append(self)
        try:
            with saved_tensors_hooks(_pack, _unpack):
                yield
        finally:
            _open.remove(self)

    def place_of(self, tensor: Tensor) -> SavedView | None:
        """Return the place of full parameters; None for a tensor of other memory."""
        if tensor.layout is not torch.strided:
            return None
        if isinstance(tensor, nn.Parameter):
            unit = self._unit_of.get(tensor)
            return None if unit is None else self._place(unit, tensor)
        return self._place_of_view(tensor)

    def _place_of_view(self, tensor: Tensor) -> SavedView | None:
        try:
            unit = self._unit_at.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError) as error:
            raise RuntimeError(
                "autograd saves a tensor without memory of its own (a transform of torch.func, forward mode) while "
                "weights rest sharded: run it inside `with strategy.gathered():` outside of a microbatch, or use zero2"
            ) from error
        if unit is None:
            return None
        if unit.gather_state is GatherState.FREED:
            raise RuntimeError(
                f"a view of freed parameters is used, of shape {list(tensor.shape)}: the module that holds them has "
                "ended; clone what is to be used later, or use it inside `with strategy.gathered():`"
            )
        offset = int(tensor.storage_offset())
        size, stride = tensor.size(), tensor.stride()
        lazy = tensor.is_conj(), tensor.is_neg()
        return self._place(unit, None, tensor.dtype, size, stride, offset, *lazy)

    def _place(self, unit: Unit, *where: Any) -> SavedView:
        return SavedView(weakref.ref(self._schedule), weakref.ref(unit), unit.generation, *where)


# Of the engines whose microbatches are open: autograd asks the hooks of one alone, see [Note: saved places].
_open: list[SavedViews] = []


def _pack(tensor: Tensor) -> SavedView | SavedTensor:
    places = (views.place_of(tensor) for views in _open)
    place = next((each for each in places if each is not None), None)
    return place or SavedTensor(tensor.detach(), tensor._version)


def _unpack(kept: SavedView | SavedTensor) -> Tensor:
    if isinstance(kept, SavedTensor):
        if kept.tensor._version != kept.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(kept.tensor.shape)}; write into a clone"
            )
        return kept.tensor
    unit, engine = kept.unit(), kept.schedule()
    if unit is None or engine is None:
        raise RuntimeError(
            "backward needs weights of an engine that no longer exists: keep the strategy until then"
        )
    if unit.generation != kept.generation:
        raise RuntimeError(
            f"{unit}: backward needs weights that an optimizer step has changed since the forward; run backward "
            "before strategy.step()"
        )
    engine.make_ready_for_backward(unit)
    if kept.parameter is not None:
        return kept.parameter
    assert unit.full is not None
    view = unit.full.view(kept.dtype, kept.size, kept.stride, kept.offset)
    view = view.conj() if kept.is_conj else view
    return torch._neg_view(view) if kept.is_neg else view
