"""What a rank holds, read from what any number of other ranks saved: canonical pieces are cut anew as they are loaded.

saved by 4 ranks    |  0  |  1  |  2  |  3  |      pieces, which may overlap
rank 0 of 2         start ─────▶|                  the elements that it holds now, of whichever pieces have them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from zeroexp.cut.moment_blocks import BLOCK, ROW_BYTES, bytes_of_elements
from zeroexp.interface.canonical import WEIGHT, is_moment
from zeroexp.interface.quantized_moments import decode, lies_in_blocks
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor


def require_covered(canonical: CanonicalTensor, start: int, stop: int, name: str) -> None:
    """Raise ValueError, naming `name`, unless pieces hold all elements from `start` up to `stop`."""
    for piece in sorted(canonical.pieces, key=lambda piece: piece.start):
        if piece.start <= start:
            start = max(start, piece.start + piece.tensor.numel())
    if start < stop:
        raise ValueError(
            f"state of {name}: elements {start} to {stop - 1} of {list(canonical.shape)} are in no piece; "
            "load pieces that together cover what this rank holds, as merge(states) of all ranks' states does"
        )


def fill_from_canonical(
    flat: Tensor, canonical: CanonicalTensor, *, start: int = 0, name: str = ""
) -> None:
    """Write elements start, start + 1, ... of the canonical tensor into the one-dimensional `flat`.

    Pieces may overlap. Raises ValueError if they do not cover all elements of `flat`.
    """
    stop = start + flat.numel()
    require_covered(canonical, start, stop, name)
    for piece in canonical.pieces:
        low = max(start, piece.start)
        high = min(stop, piece.start + piece.tensor.numel())
        if low < high:
            flat[low - start : high - start].copy_(
                piece.tensor[low - piece.start : high - piece.start]
            )


@dataclass(frozen=True)
class SavedMoment:
    """One moment of a parameter as it was saved."""

    canonical: CanonicalTensor
    # True: one value per element of the parameter; False: one value for the whole parameter
    of_elements: bool
    follows: bool  # its dtype was the weight's when saved, and becomes the weight's again
    in_blocks: bool  # as rows of codes of 8 bits (quantized_moments.py)

    def require_covered(self, start: int, stop: int, name: str) -> None:
        """Raise ValueError unless what loading these elements of the parameter needs is in pieces."""
        require_covered(self.canonical, *self._range(start, stop), name)

    def fill(self, flat: Tensor, *, start: int = 0, name: str = "") -> None:
        """Write it into `flat`: of the parameter's elements from `start` on, or what is one for all of them."""
        first, last = self._range(start, start + flat.numel())
        if not self.in_blocks:
            fill_from_canonical(flat, self.canonical, start=first, name=name)
            return
        rows = torch.empty(last - first, dtype=torch.int8, device=flat.device)
        fill_from_canonical(rows, self.canonical, start=first, name=name)
        flat.copy_(decode(rows.view(-1, ROW_BYTES))[start % BLOCK :][: flat.numel()])

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        """Return which elements of what was saved hold these elements of the parameter."""
        if not self.of_elements:
            return 0, prod(self.canonical.shape)
        return bytes_of_elements(start, stop) if self.in_blocks else (start, stop)


class SavedMoments:
    """The moments in a canonical state, by parameter.

    A moment that is one number for the whole parameter has no dimension, but a 0-dim parameter's element-wise moment
    has none either. The other parameters show which of the two a moment is. If there are no others, only `step` counts
    as one number, as in torch.
    """

    def __init__(self, state: CanonicalState) -> None:
        self._state = state
        with_dims = [entry for entry in state.values() if WEIGHT in entry and entry[WEIGHT].shape]
        self._keys_with_tensors = {key for entry in with_dims for key in entry}
        self._numbers = {key for entry in with_dims for key in entry if entry[key].shape == ()}

    def of(self, name: str) -> Iterator[tuple[str, SavedMoment]]:
        weight = self._state[name][WEIGHT]
        for key, moment in self._state[name].items():
            if is_moment(key):
                number = key in self._numbers if key in self._keys_with_tensors else key == "step"
                alike = moment.shape == weight.shape and not (number and weight.shape == ())
                packed = lies_in_blocks(moment.dtype, moment.shape, weight.shape)
                follows = packed or moment.dtype == weight.dtype
                yield key, SavedMoment(moment, alike or packed, follows, packed)


def empty_moment(
    saved: SavedMoment, parameter: Tensor, optimizer: object = None, key: str = ""
) -> Tensor:
    """Allocate a moment as the optimizer keeps it: like the parameter, or with a shape of its own.

    Torch's optimizers, and those with a `moments_dtype` of None, keep moments of elements in the parameter's dtype.
    What other ones may mean by the dtype of a moment is not known: one that was saved in the weight's gets the
    parameter's, so that plain bf16 rounds a loaded fp32 moment once.
    """
    moment = saved.canonical
    if saved.of_elements:
        dtype = moments_dtype_of(optimizer, parameter, saved) or parameter.dtype
        dtype = torch.float32 if dtype is torch.int8 else dtype  # before it is encoded
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if moment.shape:  # of rows or columns: for a DTensor one again, which computes with others
        return parameter.detach().new_zeros(moment.shape, dtype=moment.dtype)
    is_read = key == "step" and _steps_are_read(optimizer, parameter)
    device = "cpu" if is_read else parameter.device  # to read it from a GPU would stop the host
    return torch.zeros((), dtype=moment.dtype, device=device)


def _steps_are_read(optimizer: object, parameter: Tensor) -> bool:
    """Whether an optimizer of torch's computes with the number of steps in Python, and not in its kernels."""
    for group in getattr(optimizer, "param_groups", ()):
        if any(parameter is each for each in group["params"]):
            in_kernels = [group[word] for word in ("fused", "capturable") if word in group]
            return bool(in_kernels) and not any(in_kernels)
    return False


def moments_dtype_of(
    optimizer: object, parameter: Tensor, saved: SavedMoment
) -> torch.dtype | None:
    """Return the dtype in which moments of elements rest; None: the parameter's."""
    if hasattr(optimizer, "part_of"):  # one of several, each for some parameters
        optimizer = optimizer.part_of(parameter)  # pyright: ignore[reportAttributeAccessIssue]
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    otherwise = None if is_torchs or saved.follows else saved.canonical.dtype
    return getattr(optimizer, "moments_dtype", otherwise)
