"""A small mixture-of-experts language model whose experts are modules; an expert without tokens is skipped.

Fused experts (as in transformers' Mixtral) always take part in backward, with zero rows where they are unused. Here an
expert that got no token on this rank is never called: its parameters get no gradient at all, and ranks differ in which
experts they skip. `allow_experts` restricts the choice of experts by hand, so that a test can force ranks to differ.

[Note: no shapes without values] The number of tokens per expert is known only at run time. So this model trains and
can be built on meta, but its forward cannot run on meta or fake tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeroexp.config.families import whole_numbers
from zeroexp.config.keys import ConfigError, ModelConfig


@dataclass(frozen=True)
class MoeShape:
    vocab_size: int
    width: int
    depth: int
    num_heads: int
    num_experts: int
    top_k: int  # experts that each token is sent to
    max_positions: int


class Attention(nn.Module):
    def __init__(self, shape: MoeShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.norm = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        # [batch, seq, 3 * width] -> three of [batch, heads, seq, width / heads]
        qkv = self.qkv(self.norm(x)).view(batch, seq, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Experts(nn.Module):
    """Sends every token to the `top_k` allowed experts with the highest router scores."""

    def __init__(self, shape: MoeShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.allowed: tuple[int, ...] | None = None  # None: all; tests let ranks skip some
        self.norm = nn.LayerNorm(shape.width)
        self.router = nn.Linear(shape.width, shape.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(shape.width) for _ in range(shape.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        allowed = range(len(self.experts)) if self.allowed is None else self.allowed
        if not allowed:
            return x
        index = torch.tensor(list(allowed), device=x.device)
        scores, choice = self.router(tokens)[:, index].topk(min(self.top_k, len(allowed)))
        weights, chosen = scores.softmax(-1), index[choice]  # both [tokens, top_k]
        mixed = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            row, rank = (chosen == expert).nonzero(as_tuple=True)
            update = self.experts[expert](tokens[row]) * weights[row, rank, None]
            mixed = mixed.index_add(0, row, update)
        return x + mixed.view_as(x)


class MoeBlock(nn.Module):
    def __init__(self, shape: MoeShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.experts = Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.attention(x))


class MoeTransformer(nn.Module):
    def __init__(self, shape: MoeShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.max_positions, shape.width)
        self.blocks = nn.ModuleList(MoeBlock(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map [batch, seq] int64 to logits [batch, seq, vocab_size]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(config: ModelConfig, vocab_size: int | None) -> MoeTransformer:
    shape = whole_numbers(MoeShape, config.moe, "model.moe")
    if shape.top_k > shape.num_experts:
        problem = f"there are {shape.num_experts} experts"
        raise ConfigError(f"model.moe.top_k={shape.top_k}: {problem}; use at most as many")
    if shape.width % shape.num_heads:
        problem = f"does not divide model.moe.width={shape.width}"
        raise ConfigError(f"model.moe.num_heads={shape.num_heads}: {problem}; use one that does")
    return MoeTransformer(shape)
