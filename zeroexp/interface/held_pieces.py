"""What a rank holds of each parameter, and what of it the rank gives to a canonical state.

Ranks that hold the same elements give even shares of them, so that each element comes from one rank. What is one for a
whole parameter, as the optimizer's step, comes from the first of those that hold its first element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from zeroexp.cut.moment_blocks import bytes_of_elements
from zeroexp.interface.quantized_moments import lies_in_blocks, shape_in_blocks
from zeroexp.interface.strategy import Piece

Share = tuple[int, int]  # a rank's number among those that hold the same, and how many they are
ALONE: Share = (0, 1)
NOTHING: Share = (1, 1)  # of a rank that gives none, where another one gives all


@dataclass(frozen=True)
class HeldPiece:
    """The elements of one parameter that a rank holds: `tensor`, from the parameter's element `start` on."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    tensor: Tensor  # the optimizer's parameter where `has_moments`
    start: int
    has_moments: bool  # this rank's optimizer keeps moments of these elements
    share: Share = ALONE
    share_of_moments: Share | None = None  # None: as of the weight
    # Returns the memory on this rank of a tensor laid out like `tensor`.
    local: Callable[[Tensor], Tensor] = Tensor.detach

    @property
    def gives_values(self) -> bool:
        """Whether the rank gives the Python values of the whole parameter."""
        return self.start == 0 and self.share[0] == 0

    @property
    def flat(self) -> Tensor:
        return self.local(self.tensor).view(-1)


def contributed_piece(
    tensor: Tensor, held: HeldPiece, share: Share
) -> tuple[tuple[int, ...], Piece]:
    """Return the shape of the whole, and what this rank gives of its part of it.

    What is one for a whole parameter may lie on ranks in parts, as a norm under FSDP2: all sum it up here.
    """
    flat, (number, count) = held.local(tensor).reshape(-1), share
    shape, start = held.shape, held.start
    if lies_in_blocks(tensor.dtype, tensor.shape, held.tensor.shape):
        shape, (start, _) = shape_in_blocks(shape), bytes_of_elements(start, start)
    elif tensor.shape != held.tensor.shape:
        whole = getattr(tensor, "full_tensor", tensor.detach)().reshape(-1)
        is_given = start == 0 and number == 0
        return tuple(tensor.shape), Piece(0, whole[: None if is_given else 0])
    first, last = (flat.numel() * n // count for n in (number, number + 1))
    return shape, Piece(start + first, flat[first:last])
