"""Write a checkpoint through torch.distributed.checkpoint: a file per rank, the manifest, one rename.

DCP's own writer puts each tensor into a zip with a pickle, and its index into another pickle. Raw numbers need neither,
and a range of a piece can be read without the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    Stored,
    StoredPiece,
    StoredTensor,
    require_whole,
    to_json,
)
from zeroexp.checkpoint.planner import Shapes, finished_future
from zeroexp.checkpoint.staging import RNG, STATE, aligned
from zeroexp.process.content_hash import hash_of


@dataclass(frozen=True)
class Target:
    """Which checkpoint of which run is written, and how many are kept."""

    run: Path
    step: int
    attempt: int
    keep: int

    @property
    def folder(self) -> Path:
        return folders.unfinished_folder(self.run, self.step, self.attempt)


class PieceWriter(StorageWriter):
    def __init__(self, target: Target, describe: Callable[[Stored, Stored], Manifest]) -> None:
        """`describe` makes the manifest from the stored state and the stored random states."""
        self._target, self._describe = target, describe
        self.num_bytes = 0  # of the whole checkpoint; known on the rank that finishes it

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is used for one checkpoint only."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._file = f"rank{kwargs['rank']}.bin"

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._target.folder.mkdir(exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        offset = 0
        with (self._target.folder / self._file).open("wb") as file:
            for item in plan.items:
                content = _bytes_of(planner.resolve_data(item))
                piece = StoredPiece(
                    self._file,
                    offset,
                    item.index.offset[0] if item.index.offset else 0,
                    item.tensor_data.chunk.sizes[0] if item.tensor_data else 0,
                    hash_of([content]),
                )
                file.write(content)
                file.write(bytes(aligned(len(content)) - len(content)))
                offset += aligned(len(content))
                results.append(WriteResult(item.index, len(content), piece))
            file.flush()
            os.fsync(file.fileno())
        return finished_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, rename the folder, remove older checkpoints; rank 0 does this once all have written."""
        stored = _stored(metadata.planner_data, [one for rank in results for one in rank])
        metadata.planner_data = None  # the remaining metadata is sent to all ranks
        manifest = self._describe(stored[STATE], stored[RNG])
        self._require_files(manifest)
        folders.write_durably(self._target.folder / MANIFEST, to_json(manifest))
        self.num_bytes = sum(one.size_in_bytes for rank in results for one in rank)
        folders.commit(self._target.run, self._target.step, self._target.attempt)
        folders.keep_newest(self._target.run, self._target.keep)

    def _require_files(self, manifest: Manifest) -> None:
        for name, num_bytes in manifest.file_bytes().items():
            path = self._target.folder / name
            if not path.exists() or path.stat().st_size < num_bytes:
                remedy = "set outputs to a folder that all nodes share"
                raise CheckpointError(f"{path}: not here, although its rank wrote it; {remedy}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _bytes_of(tensor: Any) -> memoryview:
    assert isinstance(tensor, Tensor)
    return tensor.view(torch.uint8).numpy().data


def _stored(shapes: Shapes, results: Sequence[WriteResult]) -> dict[str, Stored]:
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in shapes}
    for result in results:
        pieces[result.index.fqn].append(result.storage_data)
    stored: dict[str, Stored] = {STATE: {}, RNG: {}}
    for name, (shape, dtype) in shapes.items():
        whole = tuple(sorted(pieces[name], key=lambda piece: piece.start))
        tensor = StoredTensor(shape, dtype, whole)
        require_whole(name, tensor)
        kind, _, rest = name.partition("/")
        owner, _, key = rest.rpartition("/")
        stored[kind].setdefault(owner, {})[key] = tensor
    return stored
