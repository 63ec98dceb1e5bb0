"""The shipped models (conf/model), narrow: their structure and their layers, in a hundredth of a second each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.composing import composed
from zeroexp.config.keys import ModelConfig
from zeroexp.models.loss import loss_sum

SAMPLES, SEQ_LEN, WORDS = 2, 6, 11

LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "max_position_embeddings": SEQ_LEN,
}
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_head": 2, "n_positions": SEQ_LEN}
MOE = {"vocab_size": WORDS, "width": 16, "num_heads": 2, "max_positions": SEQ_LEN}

# Family -> the key of its sizes, those that are smaller here, and the name of its number of layers.
FAMILIES: dict[str, tuple[str, dict[str, int], str]] = {
    "llama": ("hf_config", LLAMA, "num_hidden_layers"),
    "hf": ("hf_config", {**LLAMA, "head_dim": 8}, "num_hidden_layers"),
    "mixtral": ("hf_config", LLAMA, "num_hidden_layers"),
    "gpt2": ("hf_config", GPT2, "n_layer"),
    "moe": ("moe", MOE, "depth"),
    "mlp": ("mlp", {"width": 16}, "depth"),
}


def shrunk(name: str, *, num_layers: int | None = None) -> ModelConfig:
    """The shipped model of this name with narrow layers; as many as it ships with, or so many."""
    company = ["data=yelp"] if name.endswith("yelp") else []
    config = copy.deepcopy(composed(f"model={name}", *company).model)
    key, smaller, layers = FAMILIES[config.family]
    sizes = {**getattr(config, key), **smaller}
    if "num_key_value_heads" in sizes:
        shipped = getattr(config, key)
        shared = shipped["num_key_value_heads"] < shipped["num_attention_heads"]
        sizes["num_key_value_heads"] = 1 if shared else 2
    if num_layers is not None:
        sizes[layers] = num_layers
    return replace(config, **{key: sizes})


def microbatch(
    config: ModelConfig, step: int, index: int, rank: int
) -> tuple[dict[str, Tensor], Tensor]:
    """(what the model is called with, labels), different for each."""
    random = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    task, labels = config.task, config.num_labels
    if task == "regression":
        shape = (SAMPLES, SEQ_LEN, config.mlp["width"])
        vectors = torch.randn(shape, generator=random)
        return {"vectors": vectors}, torch.randn(shape, generator=random)
    tokens = torch.randint(1, WORDS, (SAMPLES, SEQ_LEN + 1), generator=random)
    if task == "classification":
        assert labels is not None
        tokens = tokens[:, :-1]
        return {"input_ids": tokens}, torch.randint(labels, (SAMPLES,), generator=random)
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_of(
    model: Callable[..., Any], config: ModelConfig, step: int, index: int, rank: int
) -> tuple[Tensor, int]:
    """The sum of one microbatch's losses, and of how many."""
    inputs, labels = microbatch(config, step, index, rank)
    return loss_sum(model(**inputs), labels, config.task), labels.numel()
