"""Functions of whole matrices, for an optimizer that may hold pieces of them.

An optimizer that needs whole matrices has an attribute `matrices`, and applies to its tensors what is no function of
each element through it alone. An engine that cuts matrices puts there what brings the pieces together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Size, Tensor

Function = Callable[[Tensor], Tensor]  # [m, n] bfloat16 -> [m, n] bfloat16


class WholeMatrices:
    """The matrices of an optimizer whose tensors are whole."""

    def of_kind(self, kind: str) -> WholeMatrices:
        """Return those of one kind of groups, for an optimizer of these alone."""
        return self

    def shape_of(self, tensor: Tensor) -> Size | tuple[int, ...]:
        """Return the shape of the matrix of which the optimizer's `tensor` is a piece."""
        return tensor.shape

    def apply(
        self, function: Function, tensors: Sequence[Tensor], values: Sequence[Tensor]
    ) -> list[Tensor]:
        """Apply `function` to whole matrices, and return what each of the optimizer's `tensors` gets of the result.

        values: what is known of each matrix here, shaped as its tensor, in bfloat16. All ranks call it together, each
        for all its tensors that have a gradient. `function` may overwrite what it gets.
        """
        return [function(value) for value in values]
