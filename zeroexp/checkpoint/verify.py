"""Whether a checkpoint is whole, byte by byte: the submitter asks of all of it, each rank of its share. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import Manifest, StoredPiece, StoredTensor, hash_of

BUFFER_BYTES = 4 << 20


def damage(checkpoint: Path, manifest: Manifest, *, rank: int = 0, size: int = 1) -> str | None:
    """The first thing wrong with this rank's share of the pieces, in words with a remedy."""
    try:
        return folders.missing(checkpoint, manifest) or _damage(checkpoint, manifest, rank, size)
    except OSError as error:  # a broken disk, or a folder that is just thinned away
        told = f"can not be read ({error.strerror})"
        return f"{error.filename or checkpoint}: {told}{folders.remedy(checkpoint)}"


def _damage(checkpoint: Path, manifest: Manifest, rank: int, size: int) -> str | None:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for name, tensor, piece in _share(manifest, rank, size):
        if hash_of(_read(checkpoint, piece, tensor.num_bytes(piece), buffer)) != piece.hash:
            told = f"damaged, {name} at byte {piece.offset} has another hash"
            return f"{checkpoint / piece.file}: {told}{folders.remedy(checkpoint)}"
    return None


def signature(checkpoint: Path, manifest: Manifest) -> tuple[int, ...]:
    """What changes when somebody writes to its files. Raises OSError."""
    return tuple(os.stat(checkpoint / file).st_mtime_ns for file in manifest.file_bytes())


def _share(
    manifest: Manifest, rank: int, size: int
) -> Iterator[tuple[str, StoredTensor, StoredPiece]]:
    """An even part of all bytes, in the order in which they lie."""
    pieces = [(name, t, piece) for name, t in manifest.tensors() for piece in t.pieces]
    pieces.sort(key=lambda row: (row[2].file, row[2].offset))
    total = sum(tensor.num_bytes(piece) for _, tensor, piece in pieces)
    position = 0
    for name, tensor, piece in pieces:
        if position * size // total == rank:
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
