"""Read the tensors of a checkpoint one by one, whole and verified, without an engine.

Moments that rest in 8 bits are decoded: their rows of codes mean something to zeroexp alone.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from zeroexp.checkpoint.check_hashes import read_piece
from zeroexp.checkpoint.manifest import Manifest, StoredTensor
from zeroexp.cut.moment_blocks import ROW_BYTES
from zeroexp.interface.canonical import BUFFER, WEIGHT
from zeroexp.interface.quantized_moments import decode, lies_in_blocks


class Weights:
    """Reads only the requested tensor, once, and keeps no reference: a weight or buffer, or with `key` a moment."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._checkpoint, self._state = checkpoint, manifest.state
        self.shapes = {
            name: self._stored(name).shape
            for name, entry in manifest.state.items()
            if {WEIGHT, BUFFER} & entry.keys()
        }

    def empty(self, name: str, key: str | None = None) -> Tensor:
        """Return the tensor without its values, on meta."""
        stored = self._stored(name, key)
        if self._is_in_blocks(name, stored):
            return torch.empty(self.shapes[name], device="meta")
        return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")

    def read(self, name: str, key: str | None = None) -> Tensor:
        """Return a tensor in its saved dtype, what is in 8 bits in float32. Raises Damaged."""
        stored = self._stored(name, key)
        flat = torch.empty(torch.Size(stored.shape).numel(), dtype=getattr(torch, stored.dtype))
        # By its address, since the storage of a tensor that numpy has seen can not be freed before the tensor is.
        memory = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
        content, start = memoryview(memory).cast("B"), 0
        for piece in stored.pieces:
            stop = start + stored.num_bytes(piece)
            read_piece(self._checkpoint, name, piece, stop - start, content[start:stop])
            start = stop
        if self._is_in_blocks(name, stored):
            whole = torch.Size(self.shapes[name])
            return decode(flat.view(-1, ROW_BYTES))[: whole.numel()].view(whole)
        return flat.view(stored.shape)

    def _stored(self, name: str, key: str | None = None) -> StoredTensor:
        entry = self._state[name]
        return entry[key or (WEIGHT if WEIGHT in entry else BUFFER)]

    def _is_in_blocks(self, name: str, stored: StoredTensor) -> bool:
        return lies_in_blocks(getattr(torch, stored.dtype), stored.shape, self.shapes[name])
