"""Loss scaling for float16, as torch.amp.GradScaler does it with its defaults.

float16 has no numbers below 6e-8, and many gradients are smaller. So the loss is multiplied before backward, and the
sums of gradients, in float32, are divided before their norm is taken. A gradient that is too large for float16 is inf
or nan on one rank, and the norm is so on all: then all leave out this update and halve the scale. After 2000 updates in
a row they double it. A scale that was halved down to LEAST_SCALE is no remedy: the loss itself is not finite.

Scale and count lie in the groups of the optimizer, where checkpoints find them (python_values.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

SCALE, COUNT = "loss_scale", "updates_in_a_row"
FIRST_SCALE, LEAST_SCALE, GROWS_AFTER = 2.0**16, 2.0**-24, 2000


class LossScale:
    """The scale of one engine, the same on all ranks; where it is not used each method does what no scale needs."""

    has_changed = False  # by the last step

    def __init__(self, optimizer: Optimizer, *, is_used: bool, is_fake: bool = False):
        """is_fake: norms have no values to read, and all count as finite."""
        self._optimizer, self._is_used, self._is_fake = optimizer, is_used, is_fake
        if is_used:
            self._set(FIRST_SCALE, 0)

    def multiply(self, loss: Tensor) -> Tensor:
        return loss * self._now()[0] if self._is_used else loss

    def divide(self, gradients: Iterable[Tensor]) -> None:
        """Divide the sums of gradients, in place; they are asked for if there is a scale."""
        if self._is_used and (sums := list(gradients)):
            torch._foreach_mul_(sums, 1 / self._now()[0])

    def allows(self, norm: Callable[[], Tensor]) -> bool:
        """Tell whether to update, by the norm, which is asked for where it matters; the scale follows from it too.

        Raises ValueError, on all ranks, where no scale is small enough.
        """
        if not self._is_used:
            return True
        scale, count = self._now()
        is_finite = self._is_fake or bool(norm().isfinite())
        self.has_changed = not is_finite or count + 1 == GROWS_AFTER
        if not is_finite and scale <= LEAST_SCALE:
            problem = f"gradients are not finite even at a loss scale of {scale:.0e}"
            raise ValueError(
                f"float16: {problem}; use bfloat16, or look for inf or nan in the loss"
            )
        if not is_finite:
            self._set(scale / 2, 0)
        elif count + 1 == GROWS_AFTER:
            self._set(2 * scale, 0)
        else:
            self._set(scale, count + 1)
        return is_finite

    def _now(self) -> tuple[float, int]:
        group = self._optimizer.param_groups[0]
        return group[SCALE], group[COUNT]

    def _set(self, scale: float, count: int) -> None:
        for group in self._optimizer.param_groups:
            group.update({SCALE: scale, COUNT: count})
