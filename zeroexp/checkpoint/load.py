"""Load a checkpoint into an engine: check every hash, then let each rank read the ranges it needs.

Files are mapped into memory, and the pieces handed to the engine are views of them. An engine that copies a range of a
piece (interface/reshard.py) reads only that range, whatever world size and layout wrote it. The hash check reads
through one small buffer. Each piece is checked by one rank, and all ranks learn of any damage before anything is
changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from zeroexp.checkpoint import folders, rng
from zeroexp.checkpoint.check_hashes import check_pieces
from zeroexp.checkpoint.manifest import (
    CheckpointError,
    Damaged,
    Manifest,
    Stored,
    StoredTensor,
    read_manifest,
    require_same_tokens,
)
from zeroexp.interface.check_state import GIVE
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor, Piece, Strategy
from zeroexp.process import world as worlds
from zeroexp.process.world import World


def load(checkpoint: Path, strategy: Strategy, world: World, *, tokens_hash: str = "") -> Manifest:
    """Fill the engine. tokens_hash: of what it is to train on, see Manifest.

    Random states are restored only if the world size is that of the save. Raises Damaged, or CheckpointError for
    another model or other tokens, on all ranks alike and before anything is changed.
    """
    manifest = _read_verified(checkpoint, world)
    require_same_tokens(checkpoint, manifest, tokens_hash)
    try:
        strategy.load_state_dict(_mapped(checkpoint, manifest.state))
    except ValueError as error:  # all ranks fail alike: it is another model's
        problem = str(error).replace(GIVE, "give one of this model")
        raise CheckpointError(f"{checkpoint}: {problem}") from error
    if manifest.world_size == world.size and manifest.rng:  # another trainer's has none
        own = _mapped(checkpoint, {"": manifest.rng[str(world.rank)]})[""]
        rng.restore({kind: tensor.pieces[0].tensor for kind, tensor in own.items()}, world)
    return manifest


def load_newest(
    run: Path, named: str | None, strategy: Strategy, world: World, *, tokens_hash: str = ""
) -> tuple[Path, int] | None:
    """Fill the engine from this run's newest complete checkpoint, else from `named`.

    Returns the checkpoint and its number of steps, or None if the run starts from the beginning. A damaged checkpoint
    of the run is set aside with a message. Raises CheckpointError, on all ranks alike.
    """
    # Rank 0's view decides: on a network file system another rank may see a new folder later.
    own = worlds.gather_objects(folders.complete_checkpoints(run))[0]
    for number, checkpoint in reversed(list(enumerate(own))):
        try:
            return checkpoint, load(checkpoint, strategy, world, tokens_hash=tokens_hash).step
        except Damaged as error:
            if world.rank == 0:
                anew = f"from {named}" if named else "from its beginning, since no other is left"
                _pass_over(run, checkpoint, error, "from before it" if number else anew)
    if named is None:
        return None
    return Path(named), load(Path(named), strategy, world, tokens_hash=tokens_hash).step


def _pass_over(run: Path, checkpoint: Path, error: Damaged, whence: str) -> None:
    problem = str(error).partition(";")[0]
    with contextlib.suppress(OSError):  # if the folder cannot be written, the next save reports it
        problem += f"; now {folders.set_aside(checkpoint).name}, the run goes on {whence}"
        folders.append_to_log(run, {"step": folders.step_of(checkpoint), "error": problem})
    print(problem, file=sys.stderr)


# -- checking ---------------------------------------------------------------------------------------


def _read_verified(checkpoint: Path, world: World) -> Manifest:
    """Return the manifest once every rank has verified it and its share of the pieces."""
    manifest, problem = None, None
    try:
        manifest = read_manifest(checkpoint)
        check_pieces(checkpoint, manifest, rank=world.rank, size=world.size)
    except CheckpointError as error:
        problem = error
    for error in filter(None, worlds.gather_objects(problem)):
        raise error
    assert manifest is not None
    return manifest


# -- reading ----------------------------------------------------------------------------------------


def _mapped(checkpoint: Path, stored: Stored) -> CanonicalState:
    """Return views of files that are mapped privately, so that they are never written to."""

    @cache
    def mapped(file: str) -> Tensor:
        size = (checkpoint / file).stat().st_size
        return torch.from_file(str(checkpoint / file), shared=False, size=size, dtype=torch.uint8)

    return {
        name: {key: _view(tensor, mapped) for key, tensor in entry.items()}
        for name, entry in stored.items()
    }


def _view(stored: StoredTensor, file: Callable[[str], Tensor]) -> CanonicalTensor:
    dtype = getattr(torch, stored.dtype)
    pieces: list[Piece] = []
    for piece in stored.pieces:
        stop = piece.offset + stored.num_bytes(piece)
        pieces.append(Piece(piece.start, file(piece.file)[piece.offset : stop].view(dtype)))
    return CanonicalTensor(stored.shape, dtype, pieces)
