"""The training data of the ranks: a pure function of (position, rank, world size).

`position` is the global number of samples seen so far. Sample number `position + i` of the run does not depend on the
rank that reads it, so a global batch is the same at every world size, and a run resumes at any step without any state:

    one global permutation per epoch:   7 2 9 | 4 0 5 | ...       one step = the next global_batch_size of them
    rank r, microbatch m reads          position + (m * world_size + r) * micro_batch_size ...

`tokenize_and_pack.py` tokenizes the rows that `table_rows.py` reads (.csv files by `csv_files.py`) and packs them into
sequences, once, into the folder of `packed_cache.py`, which a rank maps into memory; `table_columns.py` says what
columns must hold; `synthetic.py` makes samples from their index; `batches.py` permutes them. config/data_kinds.py names
the sources, and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    # These are keyword arguments of the model; their first dimension is micro_batch_size.
    inputs: dict[str, Tensor]
    labels: Tensor  # see models.loss.loss_sum; causal: labels[t] is the target of position t

    def to(self, device: torch.device) -> Microbatch:
        inputs = {name: _carried(tensor, device) for name, tensor in self.inputs.items()}
        return Microbatch(inputs, _carried(self.labels, device))


def _carried(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device; from memory that is not pinned the host would wait for the copy to a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.new_empty(tensor.shape, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class StepBatch:
    microbatches: list[Microbatch]  # of this rank, in order
    # Number of labels that the loss is divided by: those of all ranks; where replicas step by themselves, those of the
    # rank's own replica, once for each.
    num_valid: int
    num_tokens: int  # number of input tokens (vectors) without padding, on all ranks


@dataclass(frozen=True)
class ValidationTurn:
    microbatch: Microbatch
    counts: bool  # False: this rank has no sample left, and only takes part in what all ranks do


class Samples(Protocol):
    """A finite set of samples, read by index."""

    vocab_size: int | None  # None: the samples are vectors
    source: str  # one line for the record: the data that was read

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Microbatch: ...

    def count_labels_and_tokens(self, indices: np.ndarray) -> tuple[int, int]:
        """Return (valid labels, input tokens without padding) of these samples, without reading their tokens."""
        ...
