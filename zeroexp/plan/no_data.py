"""Samples of the configured shape without values, for models that run on tensors without memory."""

from __future__ import annotations

import torch

from zeroexp.config.keys import Config
from zeroexp.data import Microbatch, StepBatch
from zeroexp.data.synthetic import width_of


class NoData:
    """Samples of the configured shape, without values.

    most: so many microbatches of a step are given out; None: all. holds_others: the samples of the others are in the
    rank's memory all the same.
    """

    def __init__(
        self, config: Config, most: int | None = None, *, holds_others: bool = False
    ) -> None:
        self._config, self._most, self._holds_others = config, most, holds_others
        self._others: list[Microbatch] = []

    def step_batch(self, position: int, *, rank: int, world_size: int) -> StepBatch:
        data = self._config.data
        num = data.global_batch_size // (data.micro_batch_size * world_size)
        num_tokens = data.global_batch_size * data.seq_len
        most = num if self._most is None else min(num, self._most)
        self._others = [self.microbatch() for _ in range(num - most) if self._holds_others]
        return StepBatch([self.microbatch() for _ in range(most)], num_tokens, num_tokens)

    def microbatch(self) -> Microbatch:
        model, data = self._config.model, self._config.data
        shape = (data.micro_batch_size, data.seq_len)
        if data.task == "regression":
            vectors = torch.empty(*shape, width_of(model))
            return Microbatch({"vectors": vectors}, torch.empty_like(vectors))
        tokens = torch.empty(shape, dtype=torch.int64)
        labels = shape[:1] if data.task == "classification" else shape
        return Microbatch({"input_ids": tokens}, torch.empty(labels, dtype=torch.int64))
