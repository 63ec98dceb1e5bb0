"""Write the file of raw numbers of each rank, and describe them all: save.py writes that manifest when they are there.

torch.distributed.checkpoint knows boxes of tensors, which no piece of a flat buffer is, and puts each into a zip with a
pickle. Raw numbers need neither, and a range of a piece can be read without the rest.
"""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from zeroexp import __version__
from zeroexp.checkpoint.manifest import Manifest, Stored, StoredPiece, StoredTensor, require_whole
from zeroexp.checkpoint.staging import RNG, STATE
from zeroexp.comm.shared_memory_sizes import aligned
from zeroexp.config.keys import Config
from zeroexp.interface.strategy import CanonicalTensor
from zeroexp.process.content_hash import hash_of
from zeroexp.process.durable import sync

# Maps name in the checkpoint -> the tensor, of whose pieces one rank has written its own.
Written = dict[str, StoredTensor]


def write_pieces(
    folder: Path, rank: int, tensors: Iterable[tuple[str, CanonicalTensor]]
) -> Written:
    """Write this rank's pieces, which are in host memory, into its file, and sync it. Raises OSError."""
    name, offset = f"rank{rank}.bin", 0
    written: Written = {}
    folder.mkdir(exist_ok=True)
    with (folder / name).open("wb") as file:
        for key, tensor in tensors:
            stored: list[StoredPiece] = []
            for piece in tensor.pieces:
                content = piece.tensor.view(torch.uint8).numpy().data
                num_elements, content_hash = piece.tensor.numel(), hash_of([content])
                stored.append(StoredPiece(name, offset, piece.start, num_elements, content_hash))
                file.write(content)
                file.write(bytes(aligned(len(content)) - len(content)))
                offset += aligned(len(content))
            dtype = str(tensor.dtype).removeprefix("torch.")
            written[key] = StoredTensor(tuple(tensor.shape), dtype, tuple(stored))
    sync(folder / name)
    return written


def join_pieces(of_ranks: Iterable[Written]) -> tuple[Stored, Stored]:
    """Return state and random states with the pieces of all ranks. Raises ValueError where elements are missing."""
    parts: dict[str, list[StoredTensor]] = defaultdict(list)
    for written in of_ranks:
        for key, tensor in written.items():
            parts[key].append(tensor)
    joined: dict[str, Stored] = {STATE: {}, RNG: {}}
    for key, of_key in parts.items():
        assert len({(tensor.shape, tensor.dtype) for tensor in of_key}) == 1, key
        pieces = sorted((p for tensor in of_key for p in tensor.pieces), key=lambda p: p.start)
        tensor = replace(of_key[0], pieces=tuple(pieces))
        require_whole(key, tensor)
        kind, _, rest = key.partition("/")
        owner, _, entry = rest.rpartition("/")
        joined[kind].setdefault(owner, {})[entry] = tensor
    return joined[STATE], joined[RNG]


def manifest_of(
    config: Config,
    step: int,
    world_size: int,
    state: Stored,
    rng: Stored | None = None,
    tokens_hash: str = "",
) -> Manifest:
    """Describe a checkpoint that these versions of Python, torch and zeroexp write now."""
    versions = {"zeroexp": __version__, "torch": torch.__version__}
    return Manifest(
        versions={**versions, "python": platform.python_version()},
        saved_at=time.time(),
        config=asdict(config),
        step=step,
        samples_seen=step * config.data.global_batch_size,
        world_size=world_size,
        state=state,
        rng=rng or {},
        tokens_hash=tokens_hash,
    )
