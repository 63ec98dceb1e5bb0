"""DeepSpeed's universal checkpoint: one file for each parameter's weight and moments, whatever ZeRO stage or ranks.

    latest_universal                                names the folder of the step
    global_step3_universal/
        zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
        zero/optimizer_state.pt                     parameter groups, at the top for zero1, zero2, one below for zero3
        mp_rank_00_model_states.pt                  counters for zero1 and zero2, and under another name for zero3

It is read with "checkpoint": {"load_universal": true}, and knows neither frozen parameters nor buffers.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroexp.checkpoint.manifest import CheckpointError, Manifest
from zeroexp.checkpoint.weights import Weights
from zeroexp.config.keys import Config
from zeroexp.foreign.deepspeed_zero import found_of, load_mapped, model_states, untrained_parts
from zeroexp.foreign.foreign_checkpoint import ForeignCheckpoint, Place, folder_of_step
from zeroexp.foreign.matching import STEP, param_groups
from zeroexp.interface.canonical import WEIGHT
from zeroexp.interface.strategy import Piece
from zeroexp.models.module import build_empty

VERSION = "0.19.8"  # of the DeepSpeed whose loader this is for
LATEST = "latest_universal"
# Ours -> the name of the file. DeepSpeed's loader asks for Adam's moments alone.
FILES = {WEIGHT: "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", STEP: STEP}
KEYS = {file: key for key, file in FILES.items()}


def is_universal(folder: Path) -> bool:
    return (folder_of_step(folder, LATEST) / "zero" / "optimizer_state.pt").is_file()


# -- in ---------------------------------------------------------------------------------------------


def read_universal(folder: Path, names: Collection[str]) -> ForeignCheckpoint:
    """Raises CheckpointError for files that are missing or unreadable."""
    folder = folder_of_step(folder, LATEST)
    ranks_of_zero3 = len([*folder.glob("zero_pp_rank_*_model_states.pt")])
    model, shapes = model_states(folder, is_zero3=ranks_of_zero3 > 0)
    shapes.update((tied, shapes[n]) for tied, n in model["shared_params"].items() if n in shapes)
    parts = {
        Place(path.parent.name, KEYS.get(path.stem, path.stem)): [Piece(0, _values(path))]
        for path in (folder / "zero").glob("*/*.pt")
    }
    parts.update(untrained_parts(folder, model, shapes, ranks_of_zero3))
    state = load_mapped(folder / "zero" / "optimizer_state.pt")
    of_first = state.get("optimizer_state_dict", {}).get("state", {}).get(0, {})
    counted = torch.tensor([float(of_first.get(STEP, model["global_steps"]))])
    for place in [each for each in parts if each.key == "exp_avg"]:
        parts.setdefault(Place(place.name, STEP), [Piece(0, counted)])
    return found_of(folder, parts, shapes, model["global_steps"])


def _values(path: Path) -> Tensor:
    content: Any = load_mapped(path)
    return torch.as_tensor(content["param"] if isinstance(content, dict) else content).view(-1)


# -- out --------------------------------------------------------------------------------------------


def write_universal(folder: Path, config: Config, manifest: Manifest, weights: Weights) -> None:
    """Fill the empty `folder`, bit for bit. Raises Damaged, OSError, and CheckpointError for what the form lacks."""
    built = build_empty(config.model, weights.shapes)
    for name, entry in manifest.state.items():
        if not entry.keys() >= FILES.keys():
            problem = f"{name} has no moments of Adam, as frozen ones and buffers have none"
            raise CheckpointError(f"--format=deepspeed: {problem}; use --format dcp")
    step_folder = folder / f"global_step{manifest.step}_universal"
    (folder / LATEST).write_text(step_folder.name, encoding="utf-8")
    for name in manifest.state:
        of_parameter = step_folder / "zero" / name
        of_parameter.mkdir(parents=True)
        for key, file in FILES.items():
            values = weights.read(name, key)
            content: Any = values if key == STEP else {"param": values, "cat_dim": 0}
            _save(content, of_parameter / f"{file}.pt")
    _save_counters(step_folder, param_groups(config, manifest.step, built), manifest)


def _save_counters(folder: Path, groups: list[dict[str, Any]], manifest: Manifest) -> None:
    step = torch.tensor(float(manifest.step))
    # The loader of zero3 gives every group what the first one has: it gets what all have.
    shared = {k: v for k, v in groups[0].items() if all(group[k] == v for group in groups)}
    of_zero3 = {"state": {0: {STEP: step}}, "param_groups": [{**shared, "params": []}]}
    optimizer = {"ds_version": VERSION, "param_groups": groups, "optimizer_state_dict": of_zero3}
    _save(optimizer, folder / "zero" / "optimizer_state.pt")
    counters = {
        **{"module": {}, "buffer_names": [], "shared_params": {}},
        "param_shapes": [{name: entry[WEIGHT].shape for name, entry in manifest.state.items()}],
        "lr_scheduler": None,
        "global_steps": manifest.step,
        "global_samples": manifest.samples_seen,
        "skipped_steps": 0,
        "dp_world_size": manifest.world_size,
        "mp_world_size": 1,
        "ds_version": VERSION,
    }
    for name in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
        _save(counters, folder / f"{name}_model_states.pt")


def _save(content: Any, path: Path) -> None:
    """Raises OSError, which torch does not where it opens the file itself."""
    with path.open("wb") as file:
        torch.save(content, file)
