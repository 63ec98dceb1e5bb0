"""Hooks tie a unit to the forward and backward of its module, and keep places of what autograd saves of it.

forward-pre hook            the unit's parameters are needed
forward hook                they are not needed until backward; each output tensor gets a hook
hook on an output tensor    backward reaches the module (module backward hooks do not fire where the output is
                            no tuple of tensors, as at the root of a Hugging Face model); of modules that return
                            one tensor, as where a block is skipped, the last that ran is reached first
post-accumulate hook        a parameter's gradient is complete
saved-tensors hooks         autograd saves a view of gathered parameters, or asks for it again

`tensors_in` looks for tensors in outputs. For a tensor that it does not find the gather starts later, when autograd
asks for what it saved.

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

[Note: weak references] Autograd keeps its hooks as long as the parameter or the graph, where the cycle collector does
not see them. A module that keeps its output in an attribute would so keep the engine, and all that it holds, for good.
So these hooks, and the places, hold weak references to the engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from zeroexp.zero.held import GatherState
from zeroexp.zero.observer import Observer
from zeroexp.zero.schedule import Schedule
from zeroexp.zero.unit import Unit

What = TypeVar("What")


def attach(unit: Unit, module: nn.Module, schedule: Schedule, observer: Observer) -> None:
    """Report what happens to `module` and its unit's parameters to the schedule.

    A copy of the module takes the hooks along, which then do nothing. The pre-hook comes first, since other pre-hooks
    compute with the weights (`weight_norm`). The compiler does not trace the two forward hooks.
    """
    weakly = weakref.ref(schedule), weakref.ref(unit)  # [Note: weak references]

    def before_forward(called: nn.Module, _args: Any) -> None:
        if called is module:
            schedule.before_forward(unit)

    def after_forward(called: nn.Module, _args: Any, output: Any) -> None:
        if called is not module:
            return
        ticks = schedule.after_forward(unit, differentiable=torch.is_grad_enabled())
        for tensor in tensors_in(output):
            observer.returned(unit, tensor)
            if tensor.requires_grad and not tensor.is_leaf:  # nothing came before a leaf
                _call_first(tensor, partial(_report, Schedule.before_backward, *weakly, ticks))

    module.register_forward_pre_hook(_uncompiled(before_forward), prepend=True)
    module.register_forward_hook(_uncompiled(after_forward), always_call=True)
    for index, parameter in enumerate(unit.trainable_parameters):
        report = partial(_report, Schedule.gradient_ready, *weakly, index)
        parameter.register_post_accumulate_grad_hook(report)


def _call_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register a hook that backward calls before those that the tensor has already.

    A module that returns its input shares it with the module before, which backward enters later.
    """
    earlier = {**(tensor._backward_hooks or {})}
    tensor.register_hook(hook)
    if earlier:
        hooks: Any = tensor._backward_hooks
        for number, each in earlier.items():  # torch calls them in order of insertion
            del hooks[number]
            hooks[number] = each


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile calls without tracing it."""
    return torch.compiler.disable(hook)  # pyright: ignore[reportReturnType]


def _report(
    event: Callable[[Schedule, Unit, What], None],
    schedule: weakref.ref[Schedule],
    unit: weakref.ref[Unit],
    what: What,
    _tensor: Tensor,
) -> None:
    """Report an event of backward to the schedule, see [Note: weak references]."""
    engine, its = schedule(), unit()
    if engine is not None and its is not None:
        event(engine, its, what)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, in containers that pytree knows, as those of Hugging Face are."""
    return (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


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
