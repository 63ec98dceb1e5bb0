"""What only the checkpoint has is as much another model's as what only this run has."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_manifest import MADE
from tests.checkpoint.test_resume import config_for
from tests.plain_strategy import PlainStrategy
from zeroexp.checkpoint.load import load
from zeroexp.checkpoint.manifest import MANIFEST, CheckpointError, StoredTensor, to_json
from zeroexp.checkpoint.resume import resolve_resume
from zeroexp.config.keys import UndefinedCombination
from zeroexp.process import world as worlds


def write(run: Path, **changes: object) -> Path:
    folder = run / "checkpoint" / "step-000020"
    folder.mkdir(parents=True)
    manifest = replace(MADE, step=20, **changes)  # pyright: ignore[reportArgumentType]
    (folder / MANIFEST).write_bytes(to_json(manifest))
    for file, num_bytes in manifest.file_bytes().items():
        (folder / file).write_bytes(bytes(num_bytes))
    return folder


def test_a_setting_of_a_run_that_had_more_of_them(tmp_path):
    """Of the model, and deep in it: whoever compares our keys alone finds nothing."""
    config = config_for(tmp_path)
    saved = json.loads(json.dumps(asdict(config)))
    saved["model"]["hf_config"]["sliding_window"] = 16
    write(tmp_path / "run", config=saved)
    with pytest.raises(UndefinedCombination) as caught:
        resolve_resume(config_for(tmp_path, f"resume={tmp_path / 'run'}"))
    told = (
        "model.hf_config.sliding_window is 16 in it, None here; use the same, or another checkpoint"
    )
    assert str(caught.value) == f"resume={tmp_path / 'run'}: {told}"


def test_a_parameter_that_this_model_lacks(tmp_path):
    empty = StoredTensor((0,), "float32", ())
    folder = write(tmp_path / "run", state={"old.weight": {"weight": empty}}, rng={})
    strategy = PlainStrategy(torch.nn.Linear(2, 2))
    with worlds.joined_process_group() as world, pytest.raises(CheckpointError) as caught:
        load(folder, strategy, {}, world)
    told = (
        "of another model: old.weight is [0] in it, missing in this model; give one of this model"
    )
    assert str(caught.value) == f"{folder}: {told}"
