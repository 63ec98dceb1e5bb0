"""Build LLaMA, GPT-2 and Mixtral with transformers, as causal models or with a classification head."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)
from transformers.utils import logging

from zeroexp import hub
from zeroexp.config import ConfigError, ModelConfig, vocabulary
from zeroexp.models import huggingface_weights

# The path to each family's blocks, starting at the model with its head.
BLOCKS = {"llama": "model.layers", "gpt2": "transformer.h", "mixtral": "model.layers"}
TASKS = {
    "causal": AutoModelForCausalLM,
    "classification": AutoModelForSequenceClassification,
}


def build(config: ModelConfig, vocab_size: int | None) -> nn.Module:
    """Build the model with a vocabulary of `vocab_size` on the current default device, in float32 and training mode."""
    if config.task not in TASKS:
        raise ConfigError(f"model.task={config.task}: {config.family} can do {', '.join(TASKS)}")
    shape = _shape(config, vocab_size)
    on_meta = torch.empty(0).device.type == "meta"
    if config.weights is None or on_meta:
        module = TASKS[config.task].from_config(shape, attn_implementation="sdpa")
    else:
        module = _load(config, shape)
    return module.train()


def block_names(module: nn.Module, family: str) -> list[str]:
    """Dotted names of the repeated blocks, in forward order."""
    path = BLOCKS[family]
    return [f"{path}.{name}" for name, _ in module.get_submodule(path).named_children()]


def _shape(config: ModelConfig, vocab_size: int | None) -> PreTrainedConfig:
    """Build transformers' config from `hf_config`, without key-value cache and without randomness in forward."""
    if config.family not in BLOCKS:
        raise ConfigError(f"model.family={config.family}: use {', '.join(BLOCKS)}, mlp or moe")
    _check_keys(config.family, config.hf_config)
    keys = dict(config.hf_config)
    if vocab_size is not None:
        keys["vocab_size"] = vocab_size
    if config.task == "classification":
        # The head reads the last token that is not padding, so it must know the padding id.
        keys = {"pad_token_id": 0, "num_labels": config.num_labels, **keys}
    try:
        shape = AutoConfig.for_model(config.family, use_cache=False, **keys)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.hf_config of model.name={config.name}: {reason}") from error
    for key in shape.to_dict():
        if key.endswith(("dropout", "pdrop", "jitter_noise")):
            setattr(shape, key, 0.0)
    return shape


def _check_keys(family: str, given: dict[str, Any]) -> None:
    """Raise ConfigError for unknown keys, because transformers accepts a misspelt key silently."""
    shape = AutoConfig.for_model(family)
    known = [*shape.to_dict(), *shape.attribute_map]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "see transformers' documentation"
            raise ConfigError(
                f"model.hf_config.{key}: {type(shape).__name__} has no such key; {remedy}"
            )


def require_fitting_weights(config: ModelConfig, folder: Path) -> None:
    """Raise ConfigError unless `folder` holds the weights of exactly this model; no values are read.

    If the data decides the model's vocabulary size, the weights' size is assumed.
    """
    _keep_quiet()
    words = vocabulary(config) or huggingface_weights.num_words(config, folder)
    _require_fitting(config, folder, _shape(config, words))


def _require_fitting(config: ModelConfig, folder: Path, shape: PreTrainedConfig) -> None:
    with torch.device("meta"):
        module = TASKS[config.task].from_config(shape)
    huggingface_weights.require_fitting(config, folder, shape, module)


def _load(config: ModelConfig, shape: PreTrainedConfig) -> nn.Module:
    """Load real weights. All names must match; only a classification head may be missing."""
    assert config.weights is not None
    folder = hub.model_folder(config.weights)
    _keep_quiet()
    _require_fitting(config, folder, shape)
    try:
        module, report = TASKS[config.task].from_pretrained(
            folder,
            config=shape,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.weights={config.weights}: {reason}; "
            f"the folder must hold safetensors that fit model.name={config.name}"
        ) from error
    missing = [name for name in report["missing_keys"] if not name.startswith("score.")]
    assert not missing and not report["mismatched_keys"], (missing, report)
    return module


def _keep_quiet() -> None:
    """Silence transformers: its load report repeats our checks, and its warnings concern generation."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
