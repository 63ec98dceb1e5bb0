"""The loss, and the share of labels that is hit, on samples that no step trains on.

Every rank runs the same number of forward passes, without gradients and with dropout off, and the sums of their losses
meet in one message. Nothing is left behind: the module is in training mode again, no random number was drawn, and what
was sent is counted for no step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.comm.collectives import Collectives, take_traffic
from zeroexp.config.keys import Config
from zeroexp.data.batches import Data
from zeroexp.interface.strategy import Strategy
from zeroexp.models.loss import loss_sum
from zeroexp.process import progress
from zeroexp.process.world import barrier


def validated_steps(config: Config) -> set[int]:
    """Return the 0-based steps that a validation follows: every so many, and the last one."""
    if config.data.validation_split is None and config.data.validation_samples is None:
        return set()
    num_steps = config.train.warmup_steps + config.train.steps
    every = config.train.validate_every or num_steps
    return {num_steps - 1, *range(every - 1, num_steps, every)}


@dataclass(frozen=True)
class Validation:
    """Means over all labels of the validation samples, the same on every rank."""

    loss: float
    accuracy: float | None  # None for other tasks than classification


def validate(
    strategy: Strategy, data: Data, collectives: Collectives, *, task: str, step: int
) -> Validation:
    """Return what the model makes of the validation samples after `step`.

    All ranks call this between two steps, when nothing is in flight, and leave it together.
    """
    world = collectives.world
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    with torch.no_grad(), _evaluating(strategy.model):
        for turn in data.validation_turns(rank=world.rank, world_size=world.size):
            progress.note_phase(step, progress.VALIDATION)
            batch = turn.microbatch.to(world.device)
            output = strategy.model(**batch.inputs)
            sums = [loss_sum(output, batch.labels, task), _num_hits(output, batch.labels, task)]
            if turn.counts:
                total += torch.stack([each.to(total.dtype) for each in sums])
    collectives.sum_scalar_later(total, "validation").wait()
    take_traffic()
    barrier()
    loss, hits = (total / max(data.num_valid_labels, 1)).tolist()
    return Validation(loss, hits if task == "classification" else None)


def _num_hits(output: Any, labels: Tensor, task: str) -> Tensor:
    """Return how many labels have the largest logit of their row."""
    if task != "classification":
        return labels.new_zeros(())
    logits: Tensor = getattr(output, "logits", output)
    return (logits.argmax(-1) == labels).sum()


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
