"""DeepSpeed's universal checkpoint: one file for each parameter's weight and moments, whatever ZeRO stage or ranks.

    latest_universal                                names the folder of the step
    global_step3_universal/
        zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
        zero/optimizer_state.pt                     parameter groups, at the top for zero1, zero2, one below for zero3
        mp_rank_00_model_states.pt                  counters for zero1 and zero2, and under another name for zero3

It is read with "checkpoint": {"load_universal": true}, and knows neither frozen parameters nor buffers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zeroexp.checkpoint.manifest import CheckpointError, Manifest
from zeroexp.checkpoint.weights import Weights
from zeroexp.config.keys import Config
from zeroexp.foreign.matching import STEP, param_groups
from zeroexp.interface.canonical import WEIGHT
from zeroexp.models.module import build_empty

VERSION = "0.19.8"  # of the DeepSpeed whose loader this is for
# Ours -> the name of the file. DeepSpeed's loader asks for Adam's moments alone.
FILES = {WEIGHT: "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", STEP: STEP}


def write_universal(folder: Path, config: Config, manifest: Manifest, weights: Weights) -> None:
    """Fill the empty `folder`, bit for bit. Raises Damaged, OSError, and CheckpointError for what the form lacks."""
    built = build_empty(config.model, weights.shapes)
    for name, entry in manifest.state.items():
        if not entry.keys() >= FILES.keys():
            problem = f"{name} has no moments of Adam, as frozen ones and buffers have none"
            raise CheckpointError(f"--format=deepspeed: {problem}; use --format dcp")
    step_folder = folder / f"global_step{manifest.step}_universal"
    (folder / "latest_universal").write_text(step_folder.name, encoding="utf-8")
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
        "module": {},
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
