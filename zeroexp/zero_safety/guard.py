"""Parameters that are not there can not be misread: freed ones raise on use, a released root is gathered again.

A parameter keeps its identity for the whole training, but its values come and go. While they are not there, its class
is `GuardedParameter`, whose `__torch_function__` sees every use from Python before it happens:

    values                 what a use does
    freed                  it tells shape, dtype and device; a use that needs the values raises, with the remedy
    released (root)        the same, but a use that needs the values gathers them again, then goes on
    there                  it is not seen: the class is the parameter's own again, and a use costs nothing

Reading `.grad` of a parameter whose gradient the engine has taken raises as well: plain code would find None there and,
for example, clip nothing.

[Note: uses from C++] Autograd's kernels do not pass through `__torch_function__`. zero/hooks.py handles what they
saved. A freed parameter has its shape and one element, nan, in all places: a kernel that is given one makes nan of all
it computes, and one that writes into it raises. A parameter that rests whole has the weights of the step before until
`publish` has ended, for which `step` waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zeroexp.zero.engine import Engine
from zeroexp.zero.held import Held, unguarded
from zeroexp.zero.observer import Observer
from zeroexp.zero.unit import Unit
from zeroexp.zero_safety import tensor_functions as functions


@dataclass
class Guard:
    """What is known of one parameter while its values are elsewhere."""

    name: str
    shape: torch.Size
    plain: type[nn.Parameter]  # the parameter's own class
    freed: bool = False
    gradient_taken: bool = False
    nothing: Tensor | None = None  # what it shows while it is freed
    arrive: Callable[[], None] | None = None  # gathers the values again

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Pickle as None, since a parameter that was saved and loaded has no engine."""
        return _nothing, ()


class GuardedParameter(nn.Parameter):
    """The class of a parameter while its values are freed or released, or its gradient was taken."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and _freed_among(args[1]):
            return func(args[0], _as_edges(args[1]), **kwargs)
        if func is torch.autograd.backward and _freed_among(inputs := kwargs.get("inputs") or ()):
            return func(*args, **{**kwargs, "inputs": _as_edges(inputs)})
        with unguarded():
            if func == functions.SET_DATA and args[1] is args[0]:
                return None
            if func in functions.NEEDS_SHAPE and _guard_of(args[0]).freed:
                return _of_freed(func, args, kwargs)
            if func == functions.GET_DEVICE and _guard_of(args[0]).nothing is not None:
                args = (_guard_of(args[0]).nothing,)  # a fake tensor of another class can not tell
            if func not in functions.HARMLESS:
                for parameter in _guarded_among([*args, *kwargs.values()]):
                    _before_use(parameter, func)
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        guard = _guard_of(self)
        if not guard.freed:
            return super().__repr__()
        return f"Parameter {guard.name} of shape {list(guard.shape)}, freed"

    def __deepcopy__(self, memo: Any) -> Any:
        guard = _guard_of(self)
        if guard.arrive is not None:
            guard.arrive()
        elif guard.freed:
            raise _freed(guard)
        with unguarded():
            copy = guard.plain(self.data.clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy


class Guards(Observer):
    """The guards of all parameters of one engine."""

    _units: Sequence[Unit] = ()
    _are_taken = False  # whether gradients are marked as taken

    def held(self, held: Held) -> None:
        for parameter, member in zip(held.parameters, held.chunk.members, strict=True):
            parameter.zeroexp_guard = Guard(member.name, parameter.shape, type(parameter))  # pyright: ignore[reportAttributeAccessIssue]

    def built(self, engine: Engine) -> None:
        self._units = engine.units

    def shown(self, held: Held, *, there: bool) -> None:
        for parameter, nothing in zip(held.parameters, held.nothing, strict=True):
            guard = _guard_of(parameter)
            guard.freed, guard.arrive = not there, None
            guard.nothing = guard.nothing if there else nothing
            _set_class(parameter, guard)

    def released(self, unit: Unit, gather_again: Callable[[], None]) -> None:
        for parameter in unit.parameters:
            guard = _guard_of(parameter)
            guard.arrive = gather_again
            _set_class(parameter, guard)

    def gradient(self, unit: Unit, parameter: nn.Parameter, *, is_reduced: bool) -> None:
        if _somebody_took_gradient(parameter):
            raise RuntimeError(
                f"a hook of {unit} has taken a gradient before the engine reduced it over the ranks: an optimizer "
                "inside backward updates by one rank's gradient; call strategy.step() instead"
            )
        if is_reduced:
            raise RuntimeError(
                f"{unit} got a gradient after its gradients of this microbatch were reduced: call "
                "strategy.backward once in a microbatch, with the sum of the losses (use loss.backward() for all "
                "but the last), and compute penalties on weights after the model's forward"
            )

    def begin_microbatch(self) -> None:
        self._mark_gradients(taken=False)

    def backward_ended(self) -> None:
        self._mark_gradients(taken=True)

    def end_microbatch(self, *, last: bool) -> None:
        self._mark_gradients(taken=True)

    def zero_grad(self) -> None:
        self._mark_gradients(taken=False)

    def _mark_gradients(self, *, taken: bool) -> None:
        if taken is self._are_taken:
            return
        self._are_taken = taken
        for parameter in (p for unit in self._units for p in unit.trainable_parameters):
            guard = _guard_of(parameter)
            guard.gradient_taken = taken
            _set_class(parameter, guard)


def is_guarded(parameter: nn.Parameter) -> bool:
    """Tell whether an engine holds this parameter already."""
    return vars(parameter).get("zeroexp_guard") is not None


def _somebody_took_gradient(parameter: nn.Parameter) -> bool:
    """Tell whether an earlier hook took the gradient; without other hooks a custom function may have given none."""
    with unguarded():
        hooks = parameter._post_accumulate_grad_hooks
        return parameter.grad is None and hooks is not None and len(hooks) > 1


def _nothing() -> None:
    return None


def _set_class(parameter: nn.Parameter, guard: Guard) -> None:
    plain = not (guard.freed or guard.gradient_taken)
    parameter.__class__ = guard.plain if plain else GuardedParameter


def _guard_of(parameter: Any) -> Guard:
    guard = vars(parameter).get("zeroexp_guard")
    if guard is None:
        raise RuntimeError(
            "a parameter was exchanged for another tensor by torch.utils.swap_tensors, which conversions and "
            "load_state_dict() use under torch.__future__.set_swap_module_params_on_conversion(True): copy into "
            "weights inside `with strategy.gathered(write=True):`"
        )
    return guard


def _guarded_among(values: Any) -> Iterator[GuardedParameter]:
    """Yield the guarded parameters in lists, tuples and dicts of any depth."""
    if isinstance(values, GuardedParameter):
        yield values
    values = list(values.values()) if isinstance(values, dict) else values
    if isinstance(values, list | tuple):
        for value in values:
            yield from _guarded_among(value)


def _freed_among(values: Sequence[Any]) -> bool:
    return any(_guard_of(each).freed for each in _guarded_among(values))


def _as_edges(inputs: Sequence[Any]) -> list[Any]:
    """Return freed parameters as the edges where their gradients arrive, which needs no values."""
    with unguarded():
        return [get_gradient_edge(each) if _freed_among([each]) else each for each in inputs]


def _of_freed(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Answer a question that the shape, dtype and device of a freed parameter answer."""
    if func in functions.OF_SHAPE:
        return functions.OF_SHAPE[func](_guard_of(args[0]).shape, *args[1:], **kwargs)
    if func in functions.CONVERSIONS:
        return _unchanged(args[0], func(args[0].new_empty(0), *args[1:], **kwargs))
    return func(*args, **kwargs)


def _before_use(parameter: GuardedParameter, func: Callable[..., Any]) -> None:
    guard = _guard_of(parameter)
    if func in functions.OF_GRADIENT:
        if guard.gradient_taken:
            raise RuntimeError(
                f"the gradient of {guard.name} was reduced and taken by the engine: clip with max_grad_norm, "
                "change gradients by parameter.register_hook, clear them with strategy.zero_grad()"
            )
    elif guard.arrive is not None:
        guard.arrive()
    elif guard.freed:
        raise _freed(guard)


def _freed(guard: Guard) -> RuntimeError:
    return RuntimeError(
        f"parameter {guard.name} is freed: its values are there only while the module runs with which it is gathered "
        "(its block, or the whole model; a part that is called alone has to be a block); read it inside `with "
        "strategy.gathered():`, save with strategy.state_dict()"
    )


def _unchanged(parameter: GuardedParameter, converted: Tensor) -> GuardedParameter:
    """Return the parameter where `model.to(...)` changes nothing; else raise. `converted` has no elements."""
    if converted.dtype is parameter.dtype and converted.device == parameter.device:
        return parameter
    raise RuntimeError(
        f"parameter {_guard_of(parameter).name} can not become {converted.dtype} on {converted.device} in an "
        "engine: convert the model before the engine is built, or choose dtypes=Dtypes(...)"
    )
