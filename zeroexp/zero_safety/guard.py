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

from zeroexp.zero.held import Held, unguarded
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


def guard_parameters(held: Held) -> None:
    """Prepare the parameters of a chunk, whose values must be there now, for the calls below."""
    for parameter, member in zip(held.parameters, held.chunk.members, strict=True):
        parameter.zeroexp_guard = Guard(member.name, parameter.shape, type(parameter))  # pyright: ignore[reportAttributeAccessIssue]


def is_guarded(parameter: nn.Parameter) -> bool:
    """Tell whether an engine holds this parameter already."""
    return vars(parameter).get("zeroexp_guard") is not None


def guard_values(held: Held, *, there: bool) -> None:
    """Let uses of the parameters of a chunk pass where their values are `there`, and raise elsewhere."""
    for parameter, nothing in zip(held.parameters, held.nothing, strict=True):
        guard = _guard_of(parameter)
        guard.freed, guard.arrive = not there, None
        guard.nothing = guard.nothing if there else nothing
        _set_class(parameter, guard)


def await_on_use(parameter: nn.Parameter, arrive: Callable[[], None]) -> None:
    """Mark the values of a freed parameter as released: a use calls `arrive` first, which gathers them again."""
    guard = _guard_of(parameter)
    guard.arrive = arrive
    _set_class(parameter, guard)


def mark_gradient_taken(parameter: nn.Parameter, *, taken: bool) -> None:
    """Mark `.grad` as taken by the engine or not."""
    guard = _guard_of(parameter)
    guard.gradient_taken = taken
    _set_class(parameter, guard)


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
