"""Floating-point operations that a model needs for one sample, as a closed form.

    weights of products   6 N for each position: 2 a weight in forward, twice that in backward
                          (Kaplan et al. 2020, arXiv 2001.08361, without the embeddings that are looked up)
    attention             12 x layers x width x positions for each position, the causal half not left out
                          (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)

An expert counts by the share of positions that are sent to it. What is recomputed in backward is no work of the model.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from zeroexp.config import ModelConfig

FORWARD_AND_BACKWARD = 3
EXPERT = re.compile(r"\.experts\.\d+\.")


def flops_per_sample(module: nn.Module, config: ModelConfig, seq_len: int) -> float:
    """Return the operations of forward and backward for one sample of `seq_len` positions."""
    share = _share_of_experts(module, config)
    weights = 0.0
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding):
            continue
        for parameter in each.parameters(recurse=False):
            if parameter.dim() >= 2:
                is_expert = parameter.dim() == 3 or EXPERT.search(f"{name}.")
                weights += parameter.numel() * (share if is_expert else 1.0)
    attention = 2 * _attention_width(module, config) * seq_len
    return FORWARD_AND_BACKWARD * 2 * seq_len * (weights + attention)


def _share_of_experts(module: nn.Module, config: ModelConfig) -> float:
    if config.family == "moe":
        return config.moe["top_k"] / config.moe["num_experts"]
    if config.family == "mixtral":
        shape: Any = module.config
        return shape.num_experts_per_tok / shape.num_local_experts
    return 1.0


def _attention_width(module: nn.Module, config: ModelConfig) -> int:
    """Return layers x heads x size of a head; 0 where no position looks at another."""
    if config.family == "mlp":
        return 0
    if config.family == "moe":
        return config.moe["depth"] * config.moe["width"]
    shape: Any = module.config
    if not getattr(shape, "num_attention_heads", None):  # Mamba has no attention
        return 0
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return shape.num_hidden_layers * shape.num_attention_heads * head
