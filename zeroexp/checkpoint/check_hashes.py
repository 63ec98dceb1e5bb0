"""Read pieces and check the hash of each: the submitter checks all of a checkpoint, each rank its share. No torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import REMEDY, Damaged, Manifest, StoredPiece, StoredTensor
from zeroexp.process.content_hash import hash_of

BUFFER_BYTES = 4 << 20


def check_pieces(checkpoint: Path, manifest: Manifest, *, rank: int = 0, size: int = 1) -> None:
    """Raise Damaged, with a remedy, at the first damage in this rank's share of the pieces."""
    if missing := folders.find_missing_file(checkpoint, manifest):
        raise Damaged(f"{missing}; {REMEDY}")
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for name, tensor, piece in _share_of_rank(manifest, rank, size):
        read_piece(checkpoint, name, piece, tensor.num_bytes(piece), buffer)


def read_piece(
    checkpoint: Path, name: str, piece: StoredPiece, num_bytes: int, target: memoryview
) -> None:
    """Read a piece into `target`. Raises Damaged if it cannot be read, is truncated or has another hash.

    A `target` smaller than the piece, which serves the check alone, is overwritten again and again.
    """
    path = checkpoint / piece.file
    try:
        found = hash_of(_blocks(path, piece.offset, num_bytes, target))
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}; {REMEDY}") from error
    if found != piece.hash:
        damage = f"damaged, {name} at byte {piece.offset} has another hash"
        raise Damaged(f"{path}: {damage}; {REMEDY}")


def _blocks(path: Path, offset: int, num_bytes: int, target: memoryview) -> Iterator[memoryview]:
    """Yield each part of `target` as soon as it is read."""
    done = 0
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while done < num_bytes:
            room = target[done % len(target) :][: num_bytes - done]
            count = file.readinto(room)
            if not count:
                raise OSError(errno.ENODATA, f"truncated to {offset + done} bytes")
            yield room[:count]
            done += count


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
