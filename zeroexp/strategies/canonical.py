"""What torch's optimizers and replicated or dim-0-sharded tensors look like as canonical pieces, and back.

Pieces are views of live memory: whoever keeps them past the next step copies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zeroexp.strategies.base import CanonicalTensor, Piece
from zeroexp.world import World


def whole(tensor: Tensor) -> CanonicalTensor:
    """A tensor that only this rank contributes."""
    return CanonicalTensor(tuple(tensor.shape), tensor.dtype, [Piece(0, _flat(tensor))])


def replicated(tensor: Tensor, world: World) -> CanonicalTensor:
    """This rank's even share of a tensor that every rank holds: together the shares are the tensor, once."""
    start, stop = (tensor.numel() * r // world.size for r in (world.rank, world.rank + 1))
    pieces = [Piece(start, _flat(tensor)[start:stop])] if stop > start else []
    return CanonicalTensor(tuple(tensor.shape), tensor.dtype, pieces)


def fill(flat: Tensor, canonical: CanonicalTensor, *, start: int = 0, name: str = "") -> None:
    """Write elements start, start + 1, ... of the canonical tensor into the one-dimensional `flat`.

    Pieces may overlap. Raises ValueError when they do not cover what `flat` holds.
    """
    covered, stop = start, start + flat.numel()
    for piece in sorted(canonical.pieces, key=lambda piece: piece.start):
        low = max(start, piece.start)
        high = min(stop, piece.start + piece.tensor.numel())
        if low < high and low <= covered:
            flat[low - start : high - start].copy_(
                piece.tensor[low - piece.start : high - piece.start]
            )
            covered = max(covered, high)
    if covered < stop:
        raise ValueError(
            f"state of {name}: elements {covered} to {stop - 1} of {list(canonical.shape)} are in no piece; "
            "load pieces that together cover what this rank holds"
        )


def moments_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors in one parameter's entry of an optimizer's state: moments, and the step."""
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def empty_moment(moment: CanonicalTensor, parameter: Tensor) -> Tensor:
    """Memory for a moment as torch.optim would make it: like the parameter, or one number.

    In the parameter's dtype, whatever it was saved in: taken up by plain bf16, an fp32 moment is rounded once.
    """
    if moment.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, requires_grad=False)
    return torch.zeros(moment.shape, dtype=moment.dtype, device=parameter.device)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)
