"""Canonical tensors: made of what a rank holds, and merged over ranks. They are read in reshard.py.

Pieces are views of live memory: a caller that keeps them past the next step copies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zeroexp.interface.strategy import CanonicalState, CanonicalTensor, Piece

# These entries of a parameter (or of a buffer) are not moments.
WEIGHT, PYTHON, BUFFER = "weight", "python", "buffer"
# What names begin with of seldom synchronised replicas (zero/outer.py), which no other engine has a use for.
OUTER = "outer."


def is_moment(key: str) -> bool:
    """Tell whether an entry of a parameter is a moment that any engine's optimizer may load."""
    return key not in (WEIGHT, PYTHON, BUFFER) and not key.startswith(OUTER)


def canonical_of_one_rank(tensor: Tensor) -> CanonicalTensor:
    """Return the canonical form of a tensor that only this rank contributes."""
    pieces = [Piece(0, tensor.detach().reshape(-1))] if tensor.numel() else []
    return CanonicalTensor(tuple(tensor.shape), tensor.dtype, pieces)


def merge(states: Sequence[CanonicalState]) -> CanonicalState:
    """Return one state with the pieces of all ranks' states, which every rank of any number may load.

    Raises ValueError where two states differ in the shape or dtype of an entry, since they are of different models.
    """
    whole: CanonicalState = {}
    entries = [
        (name, *entry) for state in states for name in state for entry in state[name].items()
    ]
    for name, key, tensor in entries:
        empty = CanonicalTensor(tensor.shape, tensor.dtype, [])
        merged = whole.setdefault(name, {}).setdefault(key, empty)
        if (merged.shape, merged.dtype) != (tensor.shape, tensor.dtype):
            one, other = (f"{list(t.shape)} {t.dtype}" for t in (merged, tensor))
            raise ValueError(
                f"merge: {name}.{key} is {one} in one state and {other} in another; give the states of "
                "one strategy's ranks"
            )
        merged.pieces.extend(tensor.pieces)
    return whole


def moments_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors (moments and the step) in the optimizer's state of one parameter."""
    moments = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    for key in moments:
        if not is_moment(key) or "/" in key:
            raise ValueError(f"the optimizer keeps a tensor under {key!r}: give it another name")
    return moments
