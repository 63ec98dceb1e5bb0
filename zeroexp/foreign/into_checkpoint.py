"""Write a checkpoint of ours from what another trainer's holds.

    names, shapes ─▶ matched with the model ─▶ rank0.bin at its full size, mapped ─▶ filled ─▶ hashed

The values go from a file of theirs straight to their place in ours, so that no tensor waits for its other parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    CheckpointError,
    Stored,
    StoredPiece,
    StoredTensor,
    to_json,
)
from zeroexp.checkpoint.storage import manifest_of
from zeroexp.comm.shared_memory_sizes import aligned
from zeroexp.config.keys import Config
from zeroexp.foreign.foreign_checkpoint import ForeignCheckpoint, Place
from zeroexp.foreign.matching import STEP, TURNED, Matched, match, names_of
from zeroexp.foreign.megatron import with_parted_rows
from zeroexp.models.module import BuiltModel, build_empty
from zeroexp.process.content_hash import hash_of

FILE = "rank0.bin"
Read = Callable[[Path, Collection[str]], ForeignCheckpoint]


def import_checkpoint(
    read: Read, folder: Path, config: Config, target: Path, step: int | None = None
) -> tuple[Path, list[str]]:
    """Write `target`/checkpoint/step-<N> from a folder of theirs; return it and notes for the user.

    step: the number of steps done, where the format does not hold it, or counts updates alone. Raises CheckpointError
    where model, optimizer or step are another, ConfigError where `target` can not be written. After an error nothing is
    left behind.
    """
    names = names_of(build_empty(config.model, {}).module)
    try:
        found = read(folder, {name for all_names in names.values() for name in all_names})
    except KeyError as error:
        problem = f"it has no {error}, which its format has had for long"
        raise CheckpointError(f"{folder}: {problem}; save it by a newer version") from error
    shapes = {place.name: tensor.shape for place, tensor in found.tensors.items()}
    built = build_empty(config.model, shapes)
    found = with_parted_rows(found, built)
    matched = match(found, built, config)
    step = _steps_done(found, matched, step)
    tensors = {ours: found.tensors[theirs] for ours, theirs in matched.sources.items()}
    # Formats may count steps once for all; then each parameter with moments gets a counter, as the optimizer keeps it.
    counted = {Place(place.name, STEP) for place in tensors if place.key == "exp_avg"}
    tensors.update((place, torch.zeros((), device="meta")) for place in counted - tensors.keys())
    with folders.filled_or_removed(target) as run:
        checkpoint = run / folders.FOLDER / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        places = _map_file(checkpoint / FILE, tensors)
        for place in places.keys() - matched.sources.keys():
            places[place].fill_(step)
        _require_tied(found, matched, places)
        for ours, theirs in matched.sources.items():
            found.read(theirs, places[ours])
            if found.in_pairs and TURNED.search(theirs.name) and theirs.key != STEP:
                _part_pairs(places[ours], built)
        state = _stored(places)
        (checkpoint / MANIFEST).write_bytes(to_json(manifest_of(config, step, 1, state)))
    return target / checkpoint.relative_to(run), matched.notes


def _steps_done(found: ForeignCheckpoint, matched: Matched, asked: int | None) -> int:
    counters = {
        theirs: torch.zeros(()) for theirs in matched.sources.values() if theirs.key == STEP
    }
    for place, counter in counters.items():
        found.read(place, counter)
    counted = found.step or int(max(counters.values(), default=0))
    # An optimizer counts updates, of which there are fewer than steps where float16 overflowed.
    if counted and asked is not None and (asked < counted or found.step not in (None, 0, asked)):
        raise CheckpointError(f"--step={asked}: {found.folder} counts {counted}; leave it out")
    if not counted and (asked is None or asked < 1):
        problem = f"{found.folder} holds no number of steps; set --step to 1 or more"
        raise CheckpointError(f"--step={'null' if asked is None else asked}: {problem}")
    return asked or counted


def _map_file(path: Path, tensors: dict[Place, Tensor]) -> dict[Place, Tensor]:
    """Make the file at its full size; return each tensor as a view of it. Raises OSError where there is no room."""
    for place, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
            problem = (
                f"{place.key} of {place.name} is {tensor.dtype}, which no checkpoint of ours has"
            )
            raise CheckpointError(f"{problem}; convert it first")
    sizes = [aligned(tensor.nbytes) for tensor in tensors.values()]
    with path.open("wb") as file:
        # A full disk would kill who writes into the mapping.
        os.posix_fallocate(file.fileno(), 0, sum(sizes))
    memory = torch.from_file(str(path), shared=True, size=sum(sizes), dtype=torch.uint8)
    rooms = zip(tensors.items(), memory.split(sizes), strict=True)
    return {
        place: room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (place, tensor), room in rooms
    }


def _part_pairs(tensor: Tensor, built: BuiltModel) -> None:
    """Put rows that stand in pairs half a head apart."""
    config: Any = built.module.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tensor.copy_(tensor.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2))


def _require_tied(found: ForeignCheckpoint, matched: Matched, places: dict[Place, Tensor]) -> None:
    """Raise CheckpointError where tied weights differ: the model was trained with weights that are not tied."""
    for theirs, ours in matched.tied.items():
        hashes: set[str] = set()
        for name in (theirs, matched.sources[ours]):
            found.read(name, places[ours])
            hashes.add(_hash(places[ours]))
        if len(hashes) > 1:
            both = f"{theirs.name} and {matched.sources[ours].name}"
            problem = f"{both} differ in it, and this model ties them"
            raise CheckpointError(f"{found.folder}: {problem}; set the model's tie_word_embeddings")


def _stored(places: dict[Place, Tensor]) -> Stored:
    state: Stored = {}
    for place, tensor in places.items():
        offset = int(tensor.storage_offset()) * tensor.itemsize
        piece = StoredPiece(FILE, offset, 0, tensor.numel(), _hash(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        stored = StoredTensor(tuple(tensor.shape), dtype, (piece,) if tensor.numel() else ())
        state.setdefault(place.name, {})[place.key] = stored
    return state


def _hash(tensor: Tensor) -> str:
    return hash_of([tensor.reshape(-1).view(torch.uint8).numpy().data])
