"""Write a checkpoint of ours from what another trainer's holds.

    names, shapes ─▶ matched with the model ─▶ each tensor read, and written as one rank writes its own

So two tensors are in memory at a time: theirs, and ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import ITEM_BYTES, MANIFEST, CheckpointError, to_json
from zeroexp.checkpoint.staging import STATE
from zeroexp.checkpoint.storage import join_pieces, manifest_of, write_pieces
from zeroexp.config.keys import Config
from zeroexp.foreign.foreign_checkpoint import ForeignCheckpoint, Place
from zeroexp.foreign.matching import STEP, TURNED, Matched, match, names_of
from zeroexp.foreign.megatron import with_parted_rows
from zeroexp.interface.strategy import CanonicalTensor, Piece
from zeroexp.models.module import BuiltModel, build_empty
from zeroexp.process.content_hash import hash_of

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
    _require_known_dtypes(tensors)
    memory = torch.empty(max(each.nbytes for each in tensors.values()), dtype=torch.uint8)
    _require_tied(found, matched, memory)
    with folders.filled_or_removed(target) as run:
        checkpoint = run / folders.FOLDER / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        each = _read_each(found, matched, [*tensors], step, built, memory)
        state, _ = join_pieces([write_pieces(checkpoint, 0, each)])
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


def _require_known_dtypes(tensors: dict[Place, Tensor]) -> None:
    for place, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
            problem = (
                f"{place.key} of {place.name} is {tensor.dtype}, which no checkpoint of ours has"
            )
            raise CheckpointError(f"{problem}; convert it first")


def _require_tied(found: ForeignCheckpoint, matched: Matched, memory: Tensor) -> None:
    """Raise CheckpointError where tied weights differ: the model was trained with weights that are not tied."""
    for theirs, ours in matched.tied.items():
        both = theirs, matched.sources[ours]
        read = (_read(found, place, memory).view(-1).view(torch.uint8) for place in both)
        if len({hash_of([values.numpy().data]) for values in read}) > 1:
            problem = f"{both[0].name} and {both[1].name} differ in it, and this model ties them"
            raise CheckpointError(f"{found.folder}: {problem}; set the model's tie_word_embeddings")


def _read_each(
    found: ForeignCheckpoint,
    matched: Matched,
    places: Sequence[Place],
    step: int,
    built: BuiltModel,
    memory: Tensor,
) -> Iterator[tuple[str, CanonicalTensor]]:
    """Yield each tensor by its name in a checkpoint, until the next one is asked for."""
    for ours in places:
        values = torch.tensor(float(step))  # where they count steps once for all
        if theirs := matched.sources.get(ours):
            values = _read(found, theirs, memory)
            if found.in_pairs and TURNED.search(theirs.name) and theirs.key != STEP:
                _part_pairs(values, built)
        pieces = [Piece(0, values.view(-1))] if values.numel() else []
        tensor = CanonicalTensor(tuple(values.shape), values.dtype, pieces)
        yield f"{STATE}/{ours.name}/{ours.key}", tensor


def _read(found: ForeignCheckpoint, theirs: Place, memory: Tensor) -> Tensor:
    """Return the values of one of their tensors, which lie in `memory`."""
    like = found.tensors[theirs]
    values = memory[: like.nbytes].view(like.dtype).view(like.shape)
    found.read(theirs, values)
    return values


def _part_pairs(tensor: Tensor, built: BuiltModel) -> None:
    """Put rows that stand in pairs half a head apart."""
    config: Any = built.module.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tensor.copy_(tensor.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2))
