"""Floating-point operations that a model needs for one sample, as a closed form.

    weights of products   6 N for each position: 2 a weight in forward, twice that in backward, 4 N of frozen ones
                          (Kaplan et al. 2020, arXiv 2001.08361, without the embeddings that are looked up)
    attention             12 x layers x width x positions for each position, those of a sliding window where a layer
                          has one, the causal half not left out (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)

What comes before all that trains has no backward: a third of both. An expert counts by the share of positions that are
sent to it. What is recomputed in backward is no work of the model.
"""

from __future__ import annotations

import re
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from torch import nn

from zeroexp.config.families import MODELS, shape_of
from zeroexp.config.keys import ModelConfig
from zeroexp.models.blocks import find_blocks
from zeroexp.models.module import without_backward

FORWARD_AND_BACKWARD = 3  # of a product: itself, the gradient of its input, that of its weight
EXPERT = re.compile(r"(^|\.)experts\.(\d+|mlp)\.")
# What the configs of transformers, and our own mixture of experts, call the experts of a token and those of a layer.
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k")
ALL_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def flops_per_sample(module: nn.Module, config: ModelConfig, seq_len: int) -> float:
    """Return the operations of forward and backward for one sample of `seq_len` positions."""
    share, forward_alone = _share_of_experts(module, config), without_backward(module)
    weights = 0.0
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding):
            continue
        for key, parameter in each.named_parameters(recurse=False):
            if parameter.dim() >= 2 and not key.endswith("bias"):  # fused experts have such biases
                fused = parameter.dim() == 3 and not isinstance(each, nn.Conv1d)
                is_expert = fused or EXPERT.search(f"{name}.")
                is_first = f"{name}.{key}".removeprefix(".") in forward_alone
                times = 1 if is_first else FORWARD_AND_BACKWARD - int(not parameter.requires_grad)
                numel = parameter.numel() * getattr(each, "weights_in_one", 1)
                weights += times * numel * (share if is_expert else 1.0)
    times = fmean(_times_of_blocks(module, forward_alone) or [FORWARD_AND_BACKWARD])
    seen = _positions_seen(getattr(module, "config", None), seq_len)
    return 2 * seq_len * (weights + times * 2 * _attention_width(module, config) * seen)


def _times_of_blocks(module: nn.Module, forward_alone: set[str]) -> list[int]:
    """Return for each block how often its products count: once where nothing trains in it or before."""
    blocks = [(name, module.get_submodule(name)) for name in find_blocks(module)]
    of_blocks = [{f"{name}.{key}" for key, _ in b.named_parameters()} for name, b in blocks]
    return [1 if forward_alone.issuperset(of) else FORWARD_AND_BACKWARD for of in of_blocks]


def _positions_seen(shape: Any, seq_len: int) -> float:
    """Return at how many positions one looks, the mean over layers; some look no further than a window."""
    window = getattr(shape, "local_attention", None) or getattr(shape, "sliding_window", None)
    types = getattr(shape, "layer_types", None) or ["sliding_attention"]
    sliding = types.count("sliding_attention") / len(types) if window else 0
    return sliding * min(seq_len, window or seq_len) + (1 - sliding) * seq_len


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
