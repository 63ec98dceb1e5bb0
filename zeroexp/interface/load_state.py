"""Load a canonical state into what a rank holds: every engine checks and fills through this file.

Each rank may be given another state, as its own pieces. So the ranks compare what they found before anything changes:
where one of them can not load, all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zeroexp.interface.buffers import Buffers
from zeroexp.interface.canonical import (
    BUFFER,
    PYTHON,
    WEIGHT,
    SavedMoments,
    empty_moment,
    fill_from_canonical,
    is_moment,
    moments_dtype_of,
    moments_of,
    require_covered,
)
from zeroexp.interface.moment_codes import at_rest
from zeroexp.interface.python_values import PythonValues, own_values
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor


@dataclass(frozen=True)
class LoadTarget:
    """The elements of one parameter that a rank holds: `tensor`, from the parameter's element `start` on."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    tensor: Tensor  # the optimizer's parameter where `has_moments`
    start: int
    has_moments: bool  # this rank's optimizer keeps moments of these elements
    local: Callable[[Tensor], Tensor] = (
        Tensor.detach
    )  # the memory on this rank of a tensor laid out like `tensor`

    def flat(self, tensor: Tensor) -> Tensor:
        return self.local(tensor).view(-1)


def load_state(
    state: CanonicalState,
    held: Sequence[LoadTarget],
    *,
    names: Sequence[str],
    optimizer: Optimizer,
    python: PythonValues,
    buffers: Buffers,
    same_everywhere: Callable[[int], bool],
    before_writes: Callable[[], None] = lambda: None,
    keeping: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Fill buffers, weights and moments. Raises ValueError on all ranks, before anything changes, where one can not.

    names: all parameters of the model. same_everywhere: whether all ranks hold the same number; all ranks call it.
    before_writes: runs when all ranks can load. keeping: what a target gets inside lies where the target does.
    """
    has_moments = any(moments_of(own) for own in optimizer.state.values())
    # A rank may own nothing: then others tell.
    has_moments = not same_everywhere(int(has_moments)) or has_moments
    problem = None
    try:
        _require_state(state)
        _require_names(state, WEIGHT, names)
        if has_moments:
            _require_moments(state)
        _require_elements(state, held)
        python.require(state)
        _require_buffers(state, buffers)
    except ValueError as error:
        problem = str(error)
    if not same_everywhere(int(problem is None)) or problem is not None:
        problem = problem or "another rank was given what it can not load"
        raise ValueError(f"strategy.load_state_dict: {problem}")
    before_writes()
    buffers.load(state)
    python.load(state)
    saved_moments = SavedMoments(state)
    for each in held:
        with keeping(each.tensor):
            name, entry = each.name, state[each.name]
            fill_from_canonical(each.flat(each.tensor), entry[WEIGHT], start=each.start, name=name)
            if each.has_moments:
                _load_moments(each, entry, saved_moments, optimizer)


def _load_moments(
    target: LoadTarget,
    entry: dict[str, CanonicalTensor],
    saved_moments: SavedMoments,
    optimizer: Optimizer,
) -> None:
    own = optimizer.state[target.tensor]
    own.clear()
    own.update(own_values(entry, target.name))
    for key, saved in saved_moments.of(target.name):
        moment = own[key] = empty_moment(saved, target.tensor, optimizer)
        flat = target.flat(moment) if saved.of_elements else moment.view(-1)
        saved.fill(flat, start=target.start, name=f"{target.name}.{key}")
        if saved.of_elements:
            own[key] = at_rest(moment, moments_dtype_of(optimizer, target.tensor, saved))


GIVE = "give what strategy.state_dict() returned, of all ranks by merge(states)"
NOUNS = {WEIGHT: "parameter", BUFFER: "buffer"}


def _require_state(state: object) -> None:
    if not isinstance(state, dict):
        raise ValueError(f"the state is a {type(state).__name__}; {GIVE}")
    for name, entry in state.items():
        if not isinstance(entry, dict):
            raise ValueError(f"the state holds a {type(entry).__name__} under {name!r:.80}; {GIVE}")
        for key, tensor in entry.items():
            if not isinstance(tensor, CanonicalTensor):
                kind, where = type(tensor).__name__, f"{name!r:.80}, {key!r:.40}"
                raise ValueError(f"the state holds a {kind} under {where}; {GIVE}")


def _require_names(state: CanonicalState, kind: str, names: Collection[str]) -> None:
    """Raise ValueError unless the state has weights, or buffers, of these names and no others."""
    ours, noun = set(names), NOUNS[kind]
    for name in (*names, *state):
        if name in ours and kind not in state.get(name, {}):
            raise ValueError(f"{noun} {name} is not in the state; {GIVE}")
        if kind in state[name] and name not in ours:
            raise ValueError(f"{noun} {name} of the state is not in the model; {GIVE}")


def _require_range(
    state: CanonicalState, kind: str, name: str, shape: Sequence[int], start: int, stop: int
) -> None:
    """Raise ValueError unless the state has these elements of a weight, or buffer, of this shape."""
    saved = state[name][kind]
    if tuple(saved.shape) != tuple(shape):
        shapes = f"{list(saved.shape)} in the state, {list(shape)} in the model"
        raise ValueError(f"{NOUNS[kind]} {name} is {shapes}; {GIVE}")
    require_covered(saved, start, stop, name)


def _require_moments(state: CanonicalState) -> None:
    if not any(key == PYTHON or is_moment(key) for entry in state.values() for key in entry):
        raise ValueError(
            "the state holds weights and no moments, and the optimizer, which has taken steps, would start anew: load "
            "it into an engine before its first step, or call model.load_state_dict() inside `with "
            "strategy.gathered(write=True):` (of the hand-written stages), which keeps the moments"
        )


def _require_elements(state: CanonicalState, held: Sequence[LoadTarget]) -> None:
    saved_moments = SavedMoments(state)
    for each in held:
        stop = each.start + each.flat(each.tensor).numel()
        _require_range(state, WEIGHT, each.name, each.shape, each.start, stop)
        for key, saved in saved_moments.of(each.name) if each.has_moments else ():
            saved.require_covered(each.start, stop, f"{each.name}.{key}")


def _require_buffers(state: CanonicalState, buffers: Buffers) -> None:
    """Raise ValueError unless the state has all buffers; or none, as older ones, of which one line is printed."""
    ours = buffers.persistent()
    if ours and not any(BUFFER in entry for entry in state.values()):
        kept = f"{next(iter(ours))} and {len(ours) - 1} others stay as they are"
        if buffers.world.rank == 0:
            print(f"the state has no buffers, as older ones have none: {kept}")
        return
    _require_names(state, BUFFER, ours)
    for name, tensor in ours.items():
        _require_range(state, BUFFER, name, tensor.shape, 0, tensor.numel())
