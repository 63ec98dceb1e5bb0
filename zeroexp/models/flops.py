"""Floating-point operations that a model needs for one sample, as a closed form.

    weights of products   6 N for each position: 2 a weight in forward, twice that in backward, 4 N of frozen ones
                          (Kaplan et al. 2020, arXiv 2001.08361, without the embeddings that are looked up)
    attention             12 x layers x width x positions for each position, the causal half not left out
                          (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)

An expert counts by the share of positions that are sent to it. What is recomputed in backward is no work of the model.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from torch import nn

from zeroexp.config.families import MODELS, shape_of
from zeroexp.config.keys import ModelConfig

FORWARD_AND_BACKWARD = 3  # of a product: itself, the gradient of its input, that of its weight
EXPERT = re.compile(r"(^|\.)experts\.(\d+|mlp)\.")
# What the configs of transformers, and our own mixture of experts, call the experts of a token and those of a layer.
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k")
ALL_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def flops_per_sample(module: nn.Module, config: ModelConfig, seq_len: int) -> float:
    """Return the operations of forward and backward for one sample of `seq_len` positions."""
    share = _share_of_experts(module, config)
    weights = 0.0
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding):
            continue
        for key, parameter in each.named_parameters(recurse=False):
            if parameter.dim() >= 2 and not key.endswith("bias"):  # fused experts have such biases
                fused = parameter.dim() == 3 and not isinstance(each, nn.Conv1d)
                is_expert = fused or EXPERT.search(f"{name}.")
                times = FORWARD_AND_BACKWARD - int(not parameter.requires_grad)
                numel = parameter.numel() * getattr(each, "weights_in_one", 1)
                weights += times * numel * (share if is_expert else 1.0)
    attention = FORWARD_AND_BACKWARD * 2 * _attention_width(module, config) * seq_len
    return 2 * seq_len * (weights + attention)


def _share_of_experts(module: nn.Module, config: ModelConfig) -> float:
    """Return the share of its experts that a model sends each position to; 1 for a model without experts."""
    is_theirs = MODELS[config.family].of_transformers
    shape: Any = module.config if is_theirs else SimpleNamespace(**shape_of(config))
    chosen, there = (
        [getattr(shape, name) for name in names if isinstance(getattr(shape, name, None), int)]
        for names in (CHOSEN, ALL_EXPERTS)
    )
    return chosen[0] / there[0] if chosen and there and there[0] else 1.0


def _attention_width(module: nn.Module, config: ModelConfig) -> float:
    """Return layers x heads x size of a head; 0 where no position looks at another."""
    family = MODELS[config.family]
    if not family.of_transformers:
        return family.attention(config) if family.attention else 0
    shape: Any = module.config
    if not getattr(shape, "num_attention_heads", None):  # Mamba has no attention
        return 0
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    if getattr(shape, "v_head_dim", None):  # latent attention has heads of two sizes
        head = (shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim) / 2
    return shape.num_hidden_layers * shape.num_attention_heads * head
