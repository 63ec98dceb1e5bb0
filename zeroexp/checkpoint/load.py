"""From a checkpoint into an engine: every hash is checked, then each rank reads the ranges it needs.

Files are mapped into memory, and the pieces handed to the engine are views of them: an engine that copies a range of a
piece reads that range and nothing else, whatever world size and layout wrote it. What is read for checking goes through
one small buffer. Each piece is checked by one rank, and all ranks hear of damage before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from zeroexp import world as worlds
from zeroexp.checkpoint import folders, rng
from zeroexp.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    Stored,
    StoredPiece,
    StoredTensor,
    hash_of,
    read_manifest,
)
from zeroexp.strategies.base import CanonicalState, CanonicalTensor, Piece, Strategy
from zeroexp.world import World

BUFFER_BYTES = 4 << 20

Shapes = Mapping[str, tuple[int, ...]]


def load(checkpoint: Path, strategy: Strategy, shapes: Shapes, world: World) -> Manifest:
    """Fill the engine; `shapes` are those of the model's parameters by name, each once.

    Random states are taken up where the world is as large as the one that saved. Raises CheckpointError, on all ranks
    alike, for another model or a damaged file.
    """
    manifest = read_manifest(checkpoint)
    _require_same_model(checkpoint, manifest, shapes)
    _agree(_damage(checkpoint, manifest, world))
    files = _Mapped(checkpoint)
    try:
        strategy.load_state_dict(files.state(manifest.state))
    except ValueError as error:  # the same on every rank: buffers or groups of another model
        raise CheckpointError(f"{checkpoint}: {error}") from error
    if manifest.world_size == world.size:
        own = files.state({"": manifest.rng[str(world.rank)]})[""]
        rng.restore({kind: tensor.pieces[0].tensor for kind, tensor in own.items()}, world)
    return manifest


def _require_same_model(checkpoint: Path, manifest: Manifest, shapes: Shapes) -> None:
    stored = {name: e["weight"].shape for name, e in manifest.state.items() if "weight" in e}
    for name in (*shapes, *stored):
        if shapes.get(name) != stored.get(name):
            has, saved = _shape(shapes, name), _shape(stored, name)
            told = f"{name} is {saved} in it, {has} in this model"
            raise CheckpointError(f"{checkpoint}: of another model: {told}; give one of this model")


def _shape(shapes: Shapes, name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "missing"


# -- checking ---------------------------------------------------------------------------------------


def _damage(checkpoint: Path, manifest: Manifest, world: World) -> str | None:
    """The first thing wrong with this rank's share of the pieces, in words."""
    if told := folders.missing(checkpoint, manifest):
        return told
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for name, tensor, piece in _share(manifest, world):
        if hash_of(_read(checkpoint, piece, tensor.num_bytes(piece), buffer)) != piece.hash:
            told = f"damaged, {name} at byte {piece.offset} has another hash"
            return f"{checkpoint / piece.file}: {told}{folders.remedy(checkpoint)}"
    return None


def _share(manifest: Manifest, world: World) -> Iterator[tuple[str, StoredTensor, StoredPiece]]:
    """An even part of all bytes, in the order in which they lie."""
    pieces = [(name, t, piece) for name, t in manifest.tensors() for piece in t.pieces]
    pieces.sort(key=lambda row: (row[2].file, row[2].offset))
    total = sum(tensor.num_bytes(piece) for _, tensor, piece in pieces)
    position = 0
    for name, tensor, piece in pieces:
        if position * world.size // total == world.rank:
            yield name, tensor, piece
        position += tensor.num_bytes(piece)


def _read(
    checkpoint: Path, piece: StoredPiece, num_bytes: int, buffer: memoryview
) -> Iterator[memoryview]:
    """The bytes of a piece, one bufferful after the other."""
    with (checkpoint / piece.file).open("rb", buffering=0) as file:
        file.seek(piece.offset)
        while num_bytes and (count := file.readinto(buffer[: min(num_bytes, BUFFER_BYTES)])):
            yield buffer[:count]
            num_bytes -= count


def _agree(damage: str | None) -> None:
    told = [one for one in worlds.gather(damage) if one]
    if told:
        raise CheckpointError(told[0])


# -- reading ----------------------------------------------------------------------------------------


class _Mapped:
    """The files of a checkpoint, each mapped when first asked for. Never written to: a private mapping."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, Tensor] = {}

    def state(self, stored: Stored) -> CanonicalState:
        return {
            name: {key: self._tensor(tensor) for key, tensor in entry.items()}
            for name, entry in stored.items()
        }

    def _tensor(self, stored: StoredTensor) -> CanonicalTensor:
        dtype = getattr(torch, stored.dtype)
        pieces: list[Piece] = []
        for piece in stored.pieces:
            stop = piece.offset + stored.num_bytes(piece)
            flat = self._file(piece.file)[piece.offset : stop].view(dtype)
            pieces.append(Piece(piece.start, flat))
        return CanonicalTensor(stored.shape, dtype, pieces)

    def _file(self, name: str) -> Tensor:
        if name not in self._files:
            path = self._checkpoint / name
            size = path.stat().st_size
            self._files[name] = torch.from_file(
                str(path), shared=False, size=size, dtype=torch.uint8
            )
        return self._files[name]
