"""Which backward runs: autograd numbers them, and one may run inside of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

NO_TASK = -1  # autograd's task id where no backward runs


def current_task() -> int:
    """Return autograd's task id of the backward that runs in this thread, or NO_TASK."""
    return torch._C._current_graph_task_id()


def has_ended(task: int) -> bool:
    """Tell whether this backward has ended: one inside another has the greater id, and NO_TASK is below all."""
    return task > current_task()


class LossBackward:
    """The backward of a microbatch that closes units, told from others, see [Note: which backward]."""

    def __init__(self) -> None:
        self.is_open = False  # whether `Strategy.backward` runs
        self._task: int | None = None  # autograd's task id of the closing backward

    @contextmanager
    def of_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield a view of `loss` whose backward, inside, closes units."""
        self.is_open = True
        if loss.requires_grad:
            # The hook on the view runs before any other, so that the first task seen is the closing one.
            loss = loss.view_as(loss)
            loss.register_hook(lambda _: self._note())
        try:
            yield loss
        finally:
            self.is_open, self._task = False, None

    def is_current(self) -> bool:
        """Tell whether the backward that runs now is the one that closes units, and not one inside it."""
        self._note()
        return self.is_open and self._task == current_task()

    def _note(self) -> None:
        if self.is_open and self._task is None:
            self._task = current_task()
