"""Read the weights and buffers of a checkpoint one by one, whole and verified, without an engine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from zeroexp.checkpoint.manifest import CheckpointError, Manifest, StoredTensor
from zeroexp.interface.canonical import BUFFER
from zeroexp.process.content_hash import hash_of

REMEDY = "give another checkpoint"


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
        """Return a tensor in its saved dtype. Raises CheckpointError if a piece is missing, truncated or damaged."""
        stored = self._stored[name]
        flat = torch.empty(torch.Size(stored.shape).numel(), dtype=getattr(torch, stored.dtype))
        self._fill(flat.view(torch.uint8).numpy().data, stored, name)
        return flat.view(stored.shape)

    def _fill(self, content: memoryview, stored: StoredTensor, name: str) -> None:
        start = 0
        for piece in stored.pieces:
            path = self._checkpoint / piece.file
            part = content[start : start + stored.num_bytes(piece)]
            try:
                with path.open("rb") as file:
                    file.seek(piece.offset)
                    num_read = file.readinto(part)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}; {REMEDY}") from error
            if num_read < len(part):
                raise CheckpointError(f"{path}: truncated, within {name}; {REMEDY}")
            if hash_of([part]) != piece.hash:
                where = f"{name} at byte {piece.offset}"
                raise CheckpointError(f"{path}: damaged, {where} has another hash; {REMEDY}")
            start += len(part)
