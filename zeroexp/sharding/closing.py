"""One backward of a microbatch closes units; this file tells it from others.

[Note: which backward] Only the backward that `Strategy.backward` runs closes units and starts reductions. Another
backward (`torch.autograd.grad`, a plain `loss.backward()`) gathers units where it needs them; the gradients it leaves
in the parameters are reduced at the end of the microbatch. A backward inside the closing one (reentrant checkpointing)
may come several times to one parameter: its gradients are not counted, and the unit is closed in one of the other ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from zeroexp.sharding.gathers import current_task


class ClosingBackward:
    def __init__(self) -> None:
        self.is_open = False  # whether `Strategy.backward` runs
        self._task: int | None = None  # autograd's task id of the closing backward

    @contextmanager
    def of_loss(self, loss: Tensor) -> Iterator[None]:
        """Let the backward of `loss` that runs inside close units."""
        self.is_open = True
        # The hook on the loss runs before any other, so that the first task seen is the closing one.
        handle = loss.register_hook(lambda _: self._note()) if loss.requires_grad else None
        try:
            yield
        finally:
            self.is_open, self._task = False, None
            if handle is not None:
                handle.remove()

    def is_current(self) -> bool:
        """Tell whether the backward that runs now is the one that closes units, and not one inside it."""
        self._note()
        return self.is_open and self._task == current_task()

    def _note(self) -> None:
        if self.is_open and self._task is None:
            self._task = current_task()
