"""Check a checkpoint byte by byte: the submitter checks all of it, each rank checks its share. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import Manifest, StoredPiece, StoredTensor
from zeroexp.process.content_hash import hash_of

BUFFER_BYTES = 4 << 20


def find_damage(
    checkpoint: Path, manifest: Manifest, *, rank: int = 0, size: int = 1
) -> str | None:
    """Return a message about the first damage in this rank's share of the pieces, with a remedy; else None."""
    try:
        damage = folders.find_missing_file(checkpoint, manifest)
        damage = damage or _find_wrong_hash(checkpoint, manifest, rank, size)
    except OSError as error:  # a broken disk, or a folder that is being removed
        damage = f"{error.filename or checkpoint}: can not be read ({error.strerror})"
    return f"{damage}; give another checkpoint" if damage else None


def _find_wrong_hash(checkpoint: Path, manifest: Manifest, rank: int, size: int) -> str | None:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for name, tensor, piece in _share_of_rank(manifest, rank, size):
        if hash_of(_read_piece(checkpoint, piece, tensor.num_bytes(piece), buffer)) != piece.hash:
            damage = f"damaged, {name} at byte {piece.offset} has another hash"
            return f"{checkpoint / piece.file}: {damage}"
    return None


def modification_times(checkpoint: Path, manifest: Manifest) -> tuple[int, ...]:
    """Return the files' modification times, which change with every write. Raises OSError."""
    return tuple(os.stat(checkpoint / file).st_mtime_ns for file in manifest.file_bytes())


def _share_of_rank(
    manifest: Manifest, rank: int, size: int
) -> Iterator[tuple[str, StoredTensor, StoredPiece]]:
    """Yield this rank's even share of all bytes, in file order."""
    pieces = [(name, t, piece) for name, t in manifest.tensors() for piece in t.pieces]
    pieces.sort(key=lambda row: (row[2].file, row[2].offset))
    total = sum(tensor.num_bytes(piece) for _, tensor, piece in pieces)
    position = 0
    for name, tensor, piece in pieces:
        if position * size // total == rank:
            yield name, tensor, piece
        position += tensor.num_bytes(piece)


def _read_piece(
    checkpoint: Path, piece: StoredPiece, num_bytes: int, buffer: memoryview
) -> Iterator[memoryview]:
    """Yield the bytes of a piece, one buffer at a time."""
    with (checkpoint / piece.file).open("rb", buffering=0) as file:
        file.seek(piece.offset)
        while num_bytes and (count := file.readinto(buffer[: min(num_bytes, BUFFER_BYTES)])):
            yield buffer[:count]
            num_bytes -= count
