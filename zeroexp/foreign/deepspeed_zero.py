"""DeepSpeed's checkpoints of ZeRO-1, ZeRO-2 and ZeRO-3, read without DeepSpeed.

    zero1, zero2   each rank's file has one flat part of every group, and says where in it which parameter lies; ranks
                   in order hold a parameter's elements in order
    zero3          every parameter is cut evenly; a rank's parts lie one behind the other in the order of param_shapes

Masters are in float32 and are what is taken as weights. Files are mapped, so that no part of them is held in memory.
Their classes are not imported: each stands for itself, and torch unpickles nothing else.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroexp.checkpoint.manifest import CheckpointError
from zeroexp.foreign.foreign_checkpoint import (
    ForeignCheckpoint,
    Place,
    folder_of_step,
    load_with_stand_ins,
)
from zeroexp.foreign.matching import STEP
from zeroexp.interface.canonical import WEIGHT
from zeroexp.interface.reshard import fill_from_canonical
from zeroexp.interface.strategy import CanonicalTensor, Piece

LATEST = "latest"
OPTIMIZER_FILES = "*_optim_states.pt"
RANKS = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)(?:_\d+)?_optim_states\.pt$")
OLDER = "give one of the whole model, saved by DeepSpeed 0.10 or newer"


Parts = dict[Place, list[Piece]]  # views of mapped files
Shapes = dict[str, tuple[int, ...]]


def is_deepspeed(folder: Path) -> bool:
    return any(folder_of_step(folder, LATEST).glob(OPTIMIZER_FILES))


def read_deepspeed(folder: Path, names: Collection[str]) -> ForeignCheckpoint:
    """Raises CheckpointError for files that are missing, unreadable, or of a part of a model."""
    folder = folder_of_step(folder, LATEST)
    ranks = [load_mapped(path) for path in _files_by_rank(folder)]
    states = [each["optimizer_state_dict"] for each in ranks]
    is_zero3 = "fp32_flat_groups" in states[0]
    count = states[0]["partition_count"]
    if len(ranks) != (max(count) if isinstance(count, list) else count):
        problem = f"{len(ranks)} files of optimizer states, of {count} ranks"
        raise CheckpointError(f"{folder}: {problem}; copy what is missing")
    model, shapes = model_states(folder, is_zero3=is_zero3)
    parts = _parts_of_zero3(states, shapes) if is_zero3 else _parts_of_groups(states)
    parts.update(untrained_parts(folder, model, shapes, len(ranks) if is_zero3 else 0))
    return found_of(folder, parts, shapes, model.get("global_steps"))


def model_states(folder: Path, *, is_zero3: bool) -> tuple[dict[str, Any], Shapes]:
    """Return what stands beside the optimizer's states, and the shapes of trained parameters in their order."""
    first = "zero_pp_rank_0_mp_rank_00" if is_zero3 else "mp_rank_00"
    model = load_mapped(folder / f"{first}_model_states.pt")
    return model, {n: tuple(s) for group in model["param_shapes"] for n, s in group.items()}


def _files_by_rank(folder: Path) -> list[Path]:
    files: dict[int, Path] = {}
    for path in folder.glob(OPTIMIZER_FILES):
        found = RANKS.search(path.name)
        if found is None or int(found[2]):
            raise CheckpointError(f"{path}: of a part of the model alone; {OLDER}")
        files[int(found[1])] = path
    return [files[rank] for rank in sorted(files)]


def untrained_parts(
    folder: Path, model: dict[str, Any], shapes: Shapes, ranks_of_zero3: int
) -> Iterator[tuple[Place, list[Piece]]]:
    """Yield the parts of each buffer and frozen parameter, and add their shapes.

    zero1 and zero2 have them whole beside the trained ones, which are rounded there. zero3 cuts the frozen ones.
    """
    buffers, cut = set(model["buffer_names"]), model.get("frozen_param_shapes") or {}
    trained_or_tied = shapes.keys() | model["shared_params"].keys()
    for name, values in model["module"].items():
        if name in buffers or (not ranks_of_zero3 and name not in trained_or_tied):
            shapes[name] = tuple(values.shape)
            yield Place(name, WEIGHT), [Piece(0, values.reshape(-1))]
    if ranks_of_zero3 and cut:
        files = [
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks_of_zero3)
        ]
        fragments = [load_mapped(folder / file)["frozen_param_fragments"] for file in files]
        for name, shape in cut.items():
            shapes[name] = tuple(shape)
            yield (
                Place(name, WEIGHT),
                [*_cut_evenly([of_rank[name] for of_rank in fragments], prod(shape))],
            )


# -- where what lies --------------------------------------------------------------------------------


def _parts_of_groups(states: list[dict[str, Any]]) -> Parts:
    parts: Parts = defaultdict(list)
    done: dict[str, int] = defaultdict(int)
    for state in states:
        for group, fragments in enumerate(state["param_slice_mappings"]):
            weights = state["single_partition_of_fp32_groups"][group]
            flat = {WEIGHT: weights, **_moments(state, group)}
            for name, fragment in fragments.items():
                _add(parts, name, done[name], flat, fragment.start, fragment.numel)
                done[name] += fragment.numel
    return parts


def _parts_of_zero3(states: list[dict[str, Any]], shapes: Shapes) -> Parts:
    parts: Parts = defaultdict(list)
    for rank, state in enumerate(states):
        groups = iter(enumerate(state["fp32_flat_groups"]))
        offset, flat, room = 0, {}, 0
        for name, shape in shapes.items():
            share = -(-prod(shape) // len(states))
            if offset + share > room:  # no parameter lies in two groups
                group, weights = next(groups)
                flat = {WEIGHT: weights, **_moments(state["optimizer_state_dict"], group)}
                offset, room = 0, weights.numel()
            numel = max(0, min(share, prod(shape) - rank * share))
            _add(parts, name, rank * share, flat, offset, numel)
            offset += share
    return parts


def _add(
    parts: Parts, name: str, start: int, flat: Mapping[str, Tensor], offset: int, numel: int
) -> None:
    """Add elements of one parameter: from `start` on there, from `offset` on in each flat tensor."""
    for key, values in flat.items():
        if key == STEP:
            parts[Place(name, key)] = [Piece(0, values)]
        elif numel:
            parts[Place(name, key)].append(Piece(start, values.narrow(0, offset, numel)))


def _moments(state: Mapping[str, Any], group: int) -> dict[str, Tensor]:
    """Return the flat moments of a group, and its number of steps as one element."""
    base = state.get("base_optimizer_state", state)
    own = (base if isinstance(base, list) else base["state"])[group]
    counted = own.get(STEP, state.get("base_optimizer_state_step"))
    if counted is None and not isinstance(base, list):
        counted = base["param_groups"][0].get(STEP)
    moments = {key: each for key, each in own.items() if isinstance(each, Tensor) and each.ndim}
    if counted is not None:
        moments[STEP] = torch.tensor([float(counted)])
    return moments


def _cut_evenly(cut: list[Tensor], numel: int) -> Iterator[Piece]:
    share = -(-numel // len(cut))
    for rank, values in enumerate(cut):
        if (stop := min(share, numel - rank * share)) > 0:
            yield Piece(rank * share, values.reshape(-1)[:stop])


def found_of(folder: Path, parts: Parts, shapes: Shapes, step: int | None) -> ForeignCheckpoint:
    """Return what these parts make. Raises CheckpointError where elements are missing.

    step: of the data and the learning rate; the optimizer counts fewer where float16 overflowed, which updates nothing.
    """
    tensors: dict[Place, Tensor] = {}
    for place, own in parts.items():
        shape = () if place.key == STEP else shapes[place.name]
        there = sum(piece.tensor.numel() for piece in own)
        if there != prod(shape):
            problem = f"{there} of {prod(shape)} elements of {place.key} of {place.name}"
            raise CheckpointError(f"{folder}: holds {problem}; copy what is missing")
        tensors[place] = own[0].tensor.new_empty(shape, device="meta")

    def read(place: Place, target: Tensor) -> None:
        saved = CanonicalTensor(tuple(target.shape), target.dtype, parts[place])
        fill_from_canonical(target.view(-1), saved, name=place.name)

    return ForeignCheckpoint(folder, tensors, read, step)


# -- files ------------------------------------------------------------------------------------------


def load_mapped(path: Path) -> dict[str, Any]:
    """Return the content with its tensors mapped. Raises CheckpointError."""
    try:
        return load_with_stand_ins(path, "deepspeed.", mmap=True, map_location="cpu")
    except (OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        problem = f"torch can not read it ({str(error).partition(chr(10))[0]})"
        raise CheckpointError(f"{path}: {problem}; {OLDER}") from error
