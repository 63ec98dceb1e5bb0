"""Parameters that are not there can not be misread: freed ones raise on use, a released root is gathered again.

A parameter keeps its identity for the whole training, but its values come and go. While they are not there, its class
is `GuardedParameter`, whose `__torch_function__` sees every use from Python before it happens:

    values                 what a use does
    freed                  it tells shape, dtype and device; a use that needs the values raises, with the remedy
    released (root)        the same, but a use that needs the values gathers them again, then goes on
    on their way           a use that needs them waits for them, then goes on (Options.publish)
    there                  it is not seen: the class is the parameter's own again, and a use costs nothing

Reading `.grad` of a parameter whose gradient the engine has taken raises as well: plain code would find None there and,
for example, clip nothing.

[Note: uses from C++] Autograd's kernels do not pass through `__torch_function__`. zero/saved_views.py handles what they
saved. A freed parameter has its shape and one element, nan, in all places: a kernel that is given one makes nan of all
it computes, and one that writes into it raises. A parameter that rests whole has the weights of the step before until
`publish` has ended, for which `step` waits, unless options.publish="forward": a kernel in C++ alone (a traced copy of
the model) may read both then, so `strategy.drain()` comes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zeroexp.zero.backward_task import NO_TASK, current_task
from zeroexp.zero.held import Held, unguarded
from zeroexp.zero.observer import Observer
from zeroexp.zero.unit import Unit
from zeroexp.zero_safety import tensor_functions as functions


@dataclass
class State:
    """Where the values and gradients of the parameters of one chunk are."""

    parameters: Sequence[nn.Parameter]
    plain: Sequence[type[nn.Parameter]]  # their own classes
    is_trainable: bool
    freed: bool = False
    gradient_taken: bool = False
    arrive: Callable[[], None] | None = None  # gathers the values again, or waits for them

    @property
    def is_gone(self) -> bool:
        """Whether a use of the values finds none, and brings none."""
        return self.freed and self.arrive is None

    def set_classes(self) -> None:
        guarded = self.freed or self.gradient_taken or self.arrive is not None
        for parameter, plain in zip(self.parameters, self.plain, strict=True):
            parameter.__class__ = GuardedParameter if guarded else plain


@dataclass
class Guard:
    """What is known of one parameter while its values are elsewhere."""

    name: str
    shape: torch.Size
    plain: type[nn.Parameter]
    nothing: Tensor  # what it shows while it is freed
    state: State  # that of all parameters of its chunk

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Pickle as None, since a parameter that was saved and loaded has no engine."""
        return _nothing, ()


class GuardedParameter(nn.Parameter):
    """The class of a parameter while its values are freed or released, or its gradient was taken."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and _freed_among(args[1]):
            return _gradients(args[0], args[1], **kwargs)
        if func is torch.autograd.backward and _freed_among(inputs := kwargs.get("inputs") or ()):
            return func(*args, **{**kwargs, "inputs": _as_edges(inputs)})
        with unguarded():
            if func == functions.SET_DATA and args[1] is args[0]:
                return None
            if func in functions.OF_SHAPE and _guard_of(args[0]).state.freed:
                return functions.OF_SHAPE[func](_guard_of(args[0]).shape, *args[1:], **kwargs)
            if func in functions.CONVERSIONS and not isinstance(args[0], GuardedParameter):
                # Another tensor, which becomes of the parameter's dtype and device.
                return func(*args, **kwargs)
            if func in functions.CONVERSIONS and _guard_of(args[0]).state.is_gone:
                nothing = _guard_of(args[0]).nothing.new_empty(0)
                return _unchanged(args[0], nothing, func(nothing, *args[1:], **kwargs))
            if func == functions.GET_DEVICE:
                args = (_guard_of(args[0]).nothing,)  # a fake tensor of another class can not tell
            if func not in functions.HARMLESS:
                for parameter in _guarded_among([*args, *kwargs.values()]):
                    _before_use(parameter, func)
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        guard = _guard_of(self)
        if not guard.state.freed:
            return super().__repr__()
        return f"Parameter {guard.name} of shape {list(guard.shape)}, freed"

    def __deepcopy__(self, memo: Any) -> Any:
        guard = _guard_of(self)
        _before_use(self, None)
        with unguarded():
            copy = guard.plain(self.data.clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy


class ParameterGuards(Observer):
    """The guards of all parameters of one engine."""

    _are_taken = False  # whether gradients are marked as taken

    def __init__(self) -> None:
        self._states: dict[int, State] = {}  # by the id of the chunk's tensors

    def held(self, held: Held) -> None:
        plain = [type(parameter) for parameter in held.parameters]
        state = self._states[id(held)] = State(held.parameters, plain, held.is_trainable)
        members = zip(held.parameters, held.chunk.members, held.nan_views, strict=True)
        for parameter, member, nothing in members:
            its = Guard(member.name, parameter.shape, type(parameter), nothing, state)
            parameter.zeroexp_guard = its  # pyright: ignore[reportAttributeAccessIssue]

    def showing(self, held: Held, *, there: bool) -> None:
        state = self._states[id(held)]
        state.freed, state.arrive = not there, None
        state.set_classes()

    def released(self, unit: Unit, gather_again: Callable[[], None]) -> None:
        for held in unit.held:
            state = self._states[id(held)]
            state.arrive = gather_again
            state.set_classes()

    def gradient(self, unit: Unit, parameter: nn.Parameter, *, is_reduced: bool) -> None:
        hooks = parameter._post_accumulate_grad_hooks
        # Without other hooks a custom function may have given none.
        if hooks is not None and len(hooks) > 1 and _has_no_gradient(parameter):
            raise RuntimeError(
                f"a hook of {unit} has taken a gradient before the engine reduced it over the ranks: an optimizer "
                "inside backward updates by one rank's gradient; call strategy.step() instead"
            )
        if is_reduced:
            raise RuntimeError(
                f"{unit} got a gradient after its gradients of this microbatch were reduced: call "
                "strategy.backward once in a microbatch, with the sum of the losses (use loss.backward() for all "
                "but the last), compute penalties on weights after the model's forward, and recompute what others "
                "use too with use_reentrant=False"
            )

    def begin_microbatch(self) -> None:
        for state in self._states.values():
            for parameter in state.parameters:
                if "zeroexp_guard" not in parameter.__dict__:
                    _guard_of(parameter)  # raises
        self._mark_gradients(taken=False)

    def backward_ended(self) -> None:
        self._mark_gradients(taken=True)

    def end_microbatch(self, *, last: bool) -> None:
        self._mark_gradients(taken=True)
        self._forget_released()

    def abandon_microbatch(self, *, reduced: bool) -> None:
        self._forget_released()

    def zero_grad(self) -> None:
        self._mark_gradients(taken=False)

    def _forget_released(self) -> None:
        """Nothing is gathered again after the microbatch in which it was released."""
        for state in self._states.values():
            if state.freed:
                state.arrive = None

    def _mark_gradients(self, *, taken: bool) -> None:
        if taken is self._are_taken:
            return
        self._are_taken = taken
        for state in self._states.values():
            state.gradient_taken = taken and state.is_trainable
            state.set_classes()


def is_guarded(parameter: nn.Parameter) -> bool:
    """Tell whether an engine holds this parameter already."""
    return vars(parameter).get("zeroexp_guard") is not None


def _has_no_gradient(parameter: nn.Parameter) -> bool:
    with unguarded():
        return parameter.grad is None


def _nothing() -> None:
    return None


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
    return any(_guard_of(each).state.freed for each in _guarded_among(values))


def _as_edges(inputs: Sequence[Any]) -> list[Any]:
    """Return freed parameters as the edges where their gradients arrive, which needs no values."""
    with unguarded():
        return [get_gradient_edge(each) if _freed_among([each]) else each for each in inputs]


def _gradients(outputs: Any, inputs: Sequence[Tensor], **options: Any) -> tuple[Tensor | None, ...]:
    """Call torch.autograd.grad, for which freed parameters are edges; zeros of an edge's shape torch can not make."""
    if not options.get("materialize_grads"):
        return torch.autograd.grad(outputs, _as_edges(inputs), **options)
    options |= {"materialize_grads": False, "allow_unused": options["allow_unused"] is not False}
    found = torch.autograd.grad(outputs, _as_edges(inputs), **options)
    graph = bool(options["create_graph"])
    pairs = zip(found, inputs, strict=True)
    return tuple(torch.zeros_like(p, requires_grad=graph) if g is None else g for g, p in pairs)


def _before_use(parameter: GuardedParameter, func: Callable[..., Any] | None) -> None:
    """Raise, or gather the values again, before a function uses them or the gradient."""
    guard = _guard_of(parameter)
    if func in functions.OF_GRADIENT:
        if guard.state.gradient_taken:
            raise RuntimeError(
                f"the gradient of {guard.name} was reduced and taken by the engine: clip with max_grad_norm, "
                "change gradients by parameter.register_hook, clear them with strategy.zero_grad()"
            )
    elif guard.state.arrive is not None:
        guard.state.arrive()
    elif guard.state.freed:
        again = "" if current_task() == NO_TASK else ", recompute it with use_reentrant=False"
        raise RuntimeError(
            f"parameter {guard.name} is freed: its values are there only while the module runs with which it is "
            "gathered (its block, or the whole model; a part that is called alone has to be a block); read it inside "
            f"`with strategy.gathered():`, save with strategy.state_dict(){again}"
        )


def _unchanged(parameter: GuardedParameter, nothing: Tensor, converted: Tensor) -> GuardedParameter:
    """Return the parameter where `model.to(...)` changes nothing; else raise. nothing: it, without elements."""
    if converted.dtype is nothing.dtype and converted.device == nothing.device:
        return parameter
    raise RuntimeError(
        f"parameter {_guard_of(parameter).name} can not become {converted.dtype} on {converted.device} in an "
        "engine: convert the model before the engine is built, or choose dtypes=Dtypes(...)"
    )
