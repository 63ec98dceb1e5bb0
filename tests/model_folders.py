"""Folders of models that transformers wrote, and what a command line is told of them before a rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.composing import composed
from zeroexp.check import check
from zeroexp.check.try_model import check_model
from zeroexp.config.keys import ConfigError, ModelConfig
from zeroexp.models.published_config import adopt_published_config


def saved(folder: Path | str, kind: str, config: Any, **how: Any) -> Path:
    """A folder of `transformers.<kind>`, with weights that no seed of a test draws."""
    torch.manual_seed(3)
    getattr(transformers, kind)(config).save_pretrained(folder, **how)
    return Path(folder)


def rewrite(folder: Path, changes: dict[str, Tensor], drop: str = "") -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    tensors.pop(drop, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rewrite_config(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    path = folder / "config.json"
    written = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in written.items() if k not in drop}))


def of_line(*words: str) -> ModelConfig:
    """The model of `zeroexp <words>`."""
    return adopt_published_config(composed(*words)).model


def refusal_of(*words: str) -> str:
    """The one line that `zeroexp <words>` ends with before a run folder is made."""
    with pytest.raises(ConfigError) as caught:
        config = adopt_published_config(composed(*words))
        check(config)
        check_model(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit, under the same names."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
