"""Copy this rank's state to host memory, so that training can change the originals while the copies are written.

The memory is allocated once and reused by every save; its size is the rank's share of weights and moments. On a machine
with a GPU it is pinned, so that the copy runs at the speed of the bus.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroexp.comm.shared_memory_sizes import aligned
from zeroexp.interface.strategy import CanonicalTensor, Piece, Strategy

STATE, RNG = "state", "rng"  # prefixes of names in the flat state

# Maps name in the checkpoint -> what this rank holds of it.
Flat = dict[str, CanonicalTensor]


def flat_state(strategy: Strategy) -> Flat:
    """Return this rank's pieces of weights, moments and buffers by their names in a checkpoint."""
    return {
        f"{STATE}/{name}/{key}": tensor
        for name, tensors in strategy.state_dict().items()
        for key, tensor in tensors.items()
    }


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Flat) -> Flat:
        """Return the tensors with every piece copied; the next call overwrites the copies."""
        sizes = [aligned(p.tensor.nbytes) for t in tensors.values() for p in t.pieces]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory first
            pinned = self._device.type == "cuda"
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        rooms = iter(self._memory[: sum(sizes)].split(sizes) if sizes else ())
        staged = {
            name: CanonicalTensor(t.shape, t.dtype, [_copied(p, next(rooms)) for p in t.pieces])
            for name, t in tensors.items()
        }
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return staged


def _copied(piece: Piece, room: Tensor) -> Piece:
    copy = room[: piece.tensor.nbytes].view(piece.tensor.dtype)
    copy.copy_(piece.tensor.detach(), non_blocking=True)
    return Piece(piece.start, copy)
