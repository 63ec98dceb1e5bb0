"""The guard keeps parameters from being misread: freed ones raise on use, a root let go is gathered again.

A parameter keeps its identity for the whole training, but its values come and go. While they are not there, its class
is `GuardedParameter`, whose `__torch_function__` sees every use from Python before it happens:

    values                 what a use does
    freed                  it tells shape, dtype and device; a use that needs the values raises, with the remedy
    let go (root)          it gathers them again, then goes on
    there                  it is not seen: the class is the parameter's own again, and a use costs nothing

Reading `.grad` of a parameter whose gradient the engine has taken raises as well: plain code would find None there and,
for example, clip nothing.

[Note: uses from C++] Autograd's kernels do not pass through `__torch_function__`. saved.py handles what they saved. A
freed parameter has its shape and one element, nan, in all places: a kernel that is given one makes nan of all it
computes, and one that writes into it raises. A parameter that rests whole has the weights of the step before until
`publish` has ended, for which `step` waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zeroexp.sharding import tensor_functions as functions

# The engine's own code runs under this context, since it knows what it reads.
unguarded = torch._C.DisableTorchFunctionSubclass


@dataclass
class Guard:
    """A guard keeps what is known of one parameter while its values are elsewhere."""

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
    """A parameter has this class while its values are freed or let go, or its gradient was taken."""

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
            sets_itself = func == functions.SET_DATA and args[1] is args[0]
            told_by_shape = func in functions.NEEDS_SHAPE and _guard_of(args[0]).freed
            if func not in functions.HARMLESS and not sets_itself and not told_by_shape:
                for parameter in _guarded_among([*args, *kwargs.values()]):
                    _before_use(parameter, func)
            elif func in functions.OF_SHAPE and _guard_of(args[0]).freed:
                return functions.OF_SHAPE[func](_guard_of(args[0]).shape, *args[1:], **kwargs)
            elif func in functions.CONVERSIONS and _guard_of(args[0]).freed:
                return _unchanged(args[0], func(args[0].new_empty(0), *args[1:], **kwargs))
            elif func == functions.GET_DEVICE and _guard_of(args[0]).nothing is not None:
                args = (
                    _guard_of(args[0]).nothing,
                )  # a fake tensor of another class can not tell it
            elif sets_itself:
                return None
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        guard = _guard_of(self)
        if not guard.freed:
            return super().__repr__()
        return f"Parameter {guard.name} of shape {list(guard.shape)}, freed"

    def __deepcopy__(self, memo: Any) -> Any:
        guard = _guard_of(self)
        if guard.freed:
            raise _freed(guard)
        if guard.arrive is not None:
            guard.arrive()
        with unguarded():
            copy = guard.plain(self.data.clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy


def guard_parameters(parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
    """Prepare parameters, whose values must be there now, for the calls below."""
    for parameter, name in zip(parameters, names, strict=True):
        parameter.zeroexp_guard = Guard(name, parameter.shape, type(parameter))  # pyright: ignore[reportAttributeAccessIssue]


def is_guarded(parameter: nn.Parameter) -> bool:
    """Tell whether an engine holds this parameter already."""
    return vars(parameter).get("zeroexp_guard") is not None


def show_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Show the values of the parameter, which lie in `values`, a tensor of its shape."""
    guard = _guard_of(parameter)
    parameter.__class__ = guard.plain
    parameter.data = values
    guard.freed, guard.arrive = False, None
    _set_class(parameter, guard)


def hide_values(parameter: nn.Parameter, nothing: Tensor) -> None:
    """Free the parameter: it shows `nothing`, which has its shape. The version counter does not advance."""
    guard = _guard_of(parameter)
    parameter.__class__ = guard.plain
    parameter.data = nothing
    guard.freed, guard.arrive, guard.nothing = True, None, nothing
    _set_class(parameter, guard)


def await_on_use(parameter: nn.Parameter, arrive: Callable[[], None]) -> None:
    """Mark the values of a freed parameter as let go: a use calls `arrive` first, which gathers them again."""
    guard = _guard_of(parameter)
    guard.freed, guard.arrive = False, arrive
    _set_class(parameter, guard)


def mark_gradient_taken(parameter: nn.Parameter, *, taken: bool) -> None:
    """Mark `.grad` as taken by the engine or not."""
    guard = _guard_of(parameter)
    guard.gradient_taken = taken
    _set_class(parameter, guard)


def _nothing() -> None:
    return None


def _set_class(parameter: nn.Parameter, guard: Guard) -> None:
    plain = not (guard.freed or guard.arrive is not None or guard.gradient_taken)
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


def _guarded_among(values: Sequence[Any]) -> Iterator[GuardedParameter]:
    for value in values:
        if isinstance(value, GuardedParameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _guarded_among(value)
        elif isinstance(value, dict):
            yield from _guarded_among(list(value.values()))


def _freed_among(values: Sequence[Any]) -> bool:
    return any(_guard_of(each).freed for each in _guarded_among(values))


def _as_edges(inputs: Sequence[Any]) -> list[Any]:
    """Return freed parameters as the edges where their gradients arrive, which needs no values."""
    with unguarded():
        return [get_gradient_edge(each) if _freed_among([each]) else each for each in inputs]


def _before_use(parameter: GuardedParameter, func: Callable[..., Any]) -> None:
    guard = _guard_of(parameter)
    if func in functions.OF_GRADIENT:
        if guard.gradient_taken:
            raise RuntimeError(
                f"the gradient of {guard.name} was reduced and taken by the engine: clip with max_grad_norm, "
                "change gradients by parameter.register_hook, clear them with strategy.zero_grad()"
            )
    elif guard.freed:
        raise _freed(guard)
    elif guard.arrive is not None:
        guard.arrive()


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
