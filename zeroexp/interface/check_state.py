"""What is asked of a canonical state before it is loaded: every engine refuses the same, in one line."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from zeroexp.interface.canonical import BUFFER, PYTHON, WEIGHT, is_moment
from zeroexp.interface.held_pieces import HeldPiece
from zeroexp.interface.module_buffers import Buffers
from zeroexp.interface.reshard import SavedMoments, require_covered
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor

GIVE = "give what strategy.state_dict() returned, of all ranks by merge(states)"
NOUNS = {WEIGHT: "parameter", BUFFER: "buffer"}


def require_state(state: object) -> None:
    if not isinstance(state, dict):
        raise ValueError(f"the state is a {type(state).__name__}; {GIVE}")
    for name, entry in state.items():
        if not isinstance(entry, dict):
            raise ValueError(f"the state holds a {type(entry).__name__} under {name!r:.80}; {GIVE}")
        for key, tensor in entry.items():
            if not isinstance(tensor, CanonicalTensor):
                kind, where = type(tensor).__name__, f"{name!r:.80}, {key!r:.40}"
                raise ValueError(f"the state holds a {kind} under {where}; {GIVE}")


def require_names(state: CanonicalState, kind: str, names: Collection[str]) -> None:
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


def has_moments(state: CanonicalState) -> bool:
    return any(key == PYTHON or is_moment(key) for entry in state.values() for key in entry)


def require_moments(state: CanonicalState) -> None:
    if not has_moments(state):
        raise ValueError(
            "the state holds weights and no moments, and the optimizer, which has taken steps, would start anew: load "
            "it into an engine before its first step, or call model.load_state_dict() inside `with "
            "strategy.gathered(write=True):` (of the hand-written stages), which keeps the moments"
        )


class Kept(NamedTuple):
    """The names of the moments that an optimizer keeps of the parameters of one group."""

    of_each: set[str]
    of_any: set[str]


def unkept_moments(entry: Collection[str], kept: Kept) -> str | None:
    """Say why an optimizer can not go on from a parameter's moments; None if all that it keeps are there, or none is.

    entry: what was saved of the parameter, by name.
    """
    saved = [key for key in entry if is_moment(key)]
    moments = {*saved} - {"step"}
    counted = {"step"} if PYTHON in entry else set[str]()  # by a number of Python
    missing = sorted(kept.of_each - {*saved} - counted) if saved else []
    if missing or (moments and not kept.of_any & moments):
        keeps = ", ".join(missing) or "none of it"
        return f"holds {', '.join(saved)}, and the optimizer keeps {keeps}"
    return None


def require_moments_kept(
    state: CanonicalState, names: Sequence[Sequence[str]], kept: Sequence[Kept]
) -> None:
    """Raise ValueError for a parameter of whose moments the optimizer can not go on.

    names: of the parameters in each group. kept: of each group; nothing is required where they are not known.
    """
    for group, keeps in zip(names, kept if len(kept) == len(names) else [], strict=False):
        for name in group:
            if problem := unkept_moments(state.get(name, {}), keeps):
                remedy = "give the optimizer that it was saved with, or a state of weights alone"
                raise ValueError(f"the state of {name} {problem}: {remedy}")


def require_pieces_cover(state: CanonicalState, held: Sequence[HeldPiece]) -> None:
    saved_moments = SavedMoments(state)
    for each in held:
        stop = each.start + each.flat.numel()
        _require_range(state, WEIGHT, each.name, each.shape, each.start, stop)
        for key, saved in saved_moments.of(each.name) if each.has_moments else ():
            saved.require_covered(each.start, stop, f"{each.name}.{key}")


def require_buffers(state: CanonicalState, buffers: Buffers) -> None:
    """Raise ValueError unless the state has all buffers."""
    ours = buffers.persistent()
    require_names(state, BUFFER, ours)
    for name, tensor in ours.items():
        _require_range(state, BUFFER, name, tensor.shape, 0, tensor.numel())
