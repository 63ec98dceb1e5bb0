"""The loss on samples that no step trains on.

Every rank runs the same number of forward passes, without gradients and with dropout off, and the sums of their losses
meet in one number. Nothing is left behind: the module is in training mode again, no random number was drawn, and what
was sent is counted for no step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from zeroexp.comm.collectives import Collectives, take_traffic
from zeroexp.data import ValidationTurn
from zeroexp.interface.strategy import Strategy
from zeroexp.models.loss import loss_sum
from zeroexp.process import progress
from zeroexp.process.world import World, barrier


class ValidationData(Protocol):
    @property
    def num_valid_labels(self) -> int: ...

    def validation_turns(self, *, rank: int, world_size: int) -> Iterator[ValidationTurn]: ...


def validation_loss(
    strategy: Strategy, data: ValidationData, collectives: Collectives, *, task: str, step: int
) -> float:
    """Return the mean loss over all labels of the validation samples after `step`, the same on every rank.

    All ranks call this between two steps, when nothing is in flight, and leave it together.
    """
    world: World = collectives.world
    total = torch.zeros(1, dtype=torch.float64, device=world.device)
    with torch.no_grad(), _evaluating(strategy.model):
        for turn in data.validation_turns(rank=world.rank, world_size=world.size):
            progress.note_phase(step, progress.VALIDATION)
            batch = turn.microbatch.to(world.device)
            loss = loss_sum(strategy.model(**batch.inputs), batch.labels, task)
            if turn.counts:
                total += loss
    collectives.sum_scalar(total, "validation")
    take_traffic()
    barrier()
    return total.item() / data.num_valid_labels


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set every module to evaluation mode, and those that trained back to training."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
