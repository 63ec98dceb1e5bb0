"""manifest.json describes a checkpoint: plain data without torch, from which one sees whether the checkpoint fits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from zeroexp.config.keys import ConfigError
from zeroexp.process.content_hash import hash_of

FORMAT = 2
MANIFEST = "manifest.json"
DTYPES_BY_BYTES = {
    16: ("complex128",),
    8: ("float64", "int64", "uint64", "complex64"),
    4: ("float32", "int32", "uint32", "complex32", "bcomplex32"),
    2: ("bfloat16", "float16", "int16", "uint16"),
    1: (
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int8", "uint8", "bool"),
    ),
}
ITEM_BYTES = {name: size for size, names in DTYPES_BY_BYTES.items() for name in names}
REMEDY = "give another checkpoint"  # of damage
WHOLE = re.compile(r"step-(\d{6,})")  # the name of a complete checkpoint
FILE_NAME = re.compile(r"rank\d+\.bin")


class CheckpointError(ConfigError):
    """The error of a checkpoint that cannot be written or loaded: one line with the file and the remedy."""


class Damaged(CheckpointError):
    """The error of a checkpoint that differs from what was written; an older one of the same run can replace it."""


class StoredPiece(NamedTuple):
    """Elements `start` to `start + numel` of a flattened tensor, stored in `file` from byte `offset` on.

    In JSON it is a row without names, to save space, since there are many.
    """

    file: str
    offset: int
    start: int
    numel: int
    hash: str  # of zeroexp/process/content_hash.py


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str  # a key of ITEM_BYTES
    pieces: tuple[StoredPiece, ...]  # sorted by start; together they hold every element once

    def num_bytes(self, piece: StoredPiece) -> int:
        return piece.numel * ITEM_BYTES[self.dtype]


# Maps parameter name -> "weight" and each optimizer moment; for random states rank -> kind of generator.
Stored = dict[str, dict[str, StoredTensor]]


@dataclass(frozen=True)
class Manifest:
    versions: dict[str, str]
    saved_at: float  # Unix seconds
    config: dict[str, Any]  # resolved config of the run that saved
    step: int  # number of steps done
    samples_seen: int  # position in the data, where the next batch begins
    world_size: int
    state: Stored
    rng: Stored  # by rank: "torch", "cuda", "python", "numpy"
    # Hashes of the tokens it trains on and, behind a blank, of their labels; empty where it reads no text.
    tokens_hash: str = ""

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        for stored in (self.state, self.rng):
            for name, entry in stored.items():
                yield from ((f"{name}/{key}", tensor) for key, tensor in entry.items())

    def file_bytes(self) -> dict[str, int]:
        """Return the minimum size of each file: the end of its last piece."""
        ends: dict[str, int] = {}
        for _, tensor in self.tensors():
            for piece in tensor.pieces:
                end = piece.offset + tensor.num_bytes(piece)
                ends[piece.file] = max(ends.get(piece.file, 0), end)
        return ends


def require_same_tokens(checkpoint: Path, manifest: Manifest, tokens_hash: str) -> None:
    """Raise CheckpointError where the checkpoint's run trained on other tokens than those of this hash."""
    if manifest.tokens_hash and tokens_hash and manifest.tokens_hash != tokens_hash:
        raise CheckpointError(
            f"{checkpoint}: data.path={manifest.config['data']['path']} held another text when its run began, or one "
            "that was tokenized or labelled otherwise; bring that text back, or begin a new run"
        )


def to_json(manifest: Manifest) -> bytes:
    """Serialize the manifest with the hash of its content."""
    content = {"format": FORMAT, **asdict(manifest)}
    return json.dumps({"hash": hash_of([_canonical(content)]), **content}).encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest. Raises Damaged if it is missing, damaged or of another step than the folder's name says.

    Raises CheckpointError if its format is newer.
    """
    path = checkpoint / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}; {REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: damaged, no JSON; {REMEDY}") from error
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise Damaged(f"{path}: no manifest of zeroexp; {REMEDY}")
    newer = f"written in format {content['format']}, this zeroexp reads up to {FORMAT}"
    is_newer = content["format"] > FORMAT
    if content.pop("hash", None) != hash_of([_canonical(content)]):
        reason = f"or {newer}" if is_newer else "its hash differs"
        raise Damaged(f"{path}: damaged, {reason}; {REMEDY}")
    if is_newer:
        raise CheckpointError(f"{path}: {newer}; update zeroexp")
    try:
        del content["format"]
        stored = {key: _stored(content[key]) for key in ("state", "rng")}
        manifest = Manifest(**{**content, **stored})
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no manifest of zeroexp ({type(error).__name__}: {error})"
        raise Damaged(f"{path}: {reason}; {REMEDY}") from error
    if (named := WHOLE.fullmatch(checkpoint.name)) and int(named[1]) != manifest.step:
        own = f"step-{manifest.step:06d}"
        raise Damaged(f"{path}: its folder was renamed, and is of {own}; rename it to {own}")
    return manifest


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _stored(rows: dict[str, Any]) -> Stored:
    return {
        name: {key: _tensor(f"{name}/{key}", row) for key, row in entry.items()}
        for name, entry in rows.items()
    }


def _tensor(name: str, row: dict[str, Any]) -> StoredTensor:
    pieces = tuple(StoredPiece(*piece) for piece in row["pieces"])
    tensor = StoredTensor(tuple(row["shape"]), row["dtype"], pieces)
    item_bytes = ITEM_BYTES[tensor.dtype]
    for piece in pieces:
        if not FILE_NAME.fullmatch(piece.file) or piece.offset < 0 or piece.offset % item_bytes:
            raise ValueError(f"{name}: a piece in {piece.file} at byte {piece.offset}")
    require_whole(name, tensor)
    return tensor


def require_whole(name: str, tensor: StoredTensor) -> None:
    """Raise ValueError unless the pieces, sorted by start, hold every element exactly once."""
    stop, numel = 0, prod(tensor.shape)
    for piece in tensor.pieces:
        if piece.start != stop or piece.numel < 1:
            raise ValueError(f"{name}: elements {stop} to {piece.start} of {numel} are in no piece")
        stop += piece.numel
    if stop != numel:
        raise ValueError(f"{name}: {stop} of {numel} elements are in its pieces")
