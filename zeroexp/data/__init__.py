"""What the ranks train on: a pure function of (position, rank, world size).

`position` is the global number of samples seen so far. Sample number `position + i` of the run is the same whoever
reads it, so a global batch is the same at every world size and a run resumes at any step without any state:

    one global permutation per epoch:   7 2 9 | 4 0 5 | ...       one step = the next global_batch_size of them
    rank r, microbatch m reads          position + (m * world_size + r) * micro_batch_size ...

`text.py` tokenises and packs once into a cache folder (the only door to datasets); `packed.py` maps that folder into
memory, all that a rank has to do; `synthetic.py` makes samples from their index; `order.py` holds the permutations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    inputs: dict[str, Tensor]  # keyword arguments of the model, first dimension micro_batch_size
    labels: Tensor  # see models.loss.loss_sum; causal: labels[t] is the target of position t

    def to(self, device: torch.device) -> Microbatch:
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return Microbatch(inputs, self.labels.to(device))


@dataclass(frozen=True)
class StepBatch:
    microbatches: list[Microbatch]  # this rank's, in order
    num_valid: int  # labels that count in the loss, of all ranks
    num_tokens: int  # input tokens (vectors) that are no padding, of all ranks


class Samples(Protocol):
    """A finite set of samples, read by index."""

    vocab_size: int | None  # None: vectors
    source: str  # one line for the record: what was read

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Microbatch: ...

    def count(self, indices: np.ndarray) -> tuple[int, int]:
        """(valid labels, input tokens that are no padding) of these samples, without reading their tokens."""
        ...
