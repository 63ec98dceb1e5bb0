"""Read the weights and buffers of a checkpoint one by one, whole and verified, without an engine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from zeroexp.checkpoint.manifest import Manifest
from zeroexp.checkpoint.verify import read_piece
from zeroexp.interface.canonical import BUFFER


class Weights:
    """Reads only the requested tensor, once, and keeps no reference to it."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._checkpoint = checkpoint
        self._stored = {
            name: entry[kind]
            for name, entry in manifest.state.items()
            for kind in ("weight", BUFFER)
            if kind in entry
        }
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}

    def read(self, name: str) -> Tensor:
        """Return a tensor in its saved dtype. Raises Damaged."""
        stored = self._stored[name]
        flat = torch.empty(torch.Size(stored.shape).numel(), dtype=getattr(torch, stored.dtype))
        content, start = flat.view(torch.uint8).numpy().data, 0
        for piece in stored.pieces:
            stop = start + stored.num_bytes(piece)
            read_piece(self._checkpoint, name, piece, stop - start, content[start:stop])
            start = stop
        return flat.view(stored.shape)
