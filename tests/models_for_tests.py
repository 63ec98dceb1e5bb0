"""Models of a millisecond with everything that can go wrong, and their data: different on every rank.

toy        tied embedding and head; odd sizes; dimensions smaller than the world; norms and biases (a second
           parameter group); frozen parameters; a parameter that nobody uses
words      toy with more words than a microbatch has tokens
reused     toy with one block that runs twice in every forward
dropout    toy that computes by its random state
large      toy with matrices of 4,400 and 5,200 elements: of many blocks of 8-bit moments, the last not full
frozen_norm toy with a BatchNorm that stays in evaluation while the rest trains
llama, gpt2, mixtral    of transformers
moe_*      module-list experts, skipped on one rank, on all ranks, or by turns
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.config.keys import ModelConfig
from zeroexp.models.loss import IGNORED
from zeroexp.models.module import BuiltModel, build_model
from zeroexp.models.moe import Experts

VOCABULARY = 11
MANY_WORDS = 37  # more than a microbatch has tokens
WIDTH = 5
SAMPLES, SEQ_LEN = 2, 6  # of one microbatch


class ToyBlock(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.gain = nn.Parameter(torch.full((1,), 0.5))  # smaller than any world
        self.shift = nn.Parameter(torch.linspace(-1, 1, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x) + self.shift)))


class Toy(nn.Module):
    def __init__(
        self,
        *,
        depth: int = 3,
        order: tuple[int, ...] = (0, 1, 2),
        dropout: float = 0.0,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        inner: int = 7,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(ToyBlock(width, inner) for _ in range(depth))
        self.unused = nn.Parameter(torch.ones(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.order = order
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[batch, seq] int64 -> logits [batch, seq, vocabulary]."""
        x = self.embedding(input_ids)
        x = x + x.cumsum(1) / SEQ_LEN
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(self.norm(self.dropout(x)))


Prepare = Callable[[nn.Module, int, int, int], None]  # (model, step, microbatch, rank)


def nothing(model: nn.Module, step: int, microbatch: int, rank: int) -> None:
    """Every microbatch uses the same modules."""


@dataclass(frozen=True)
class TestModel:
    __test__ = False

    build: Callable[[], BuiltModel]
    prepare: Prepare = nothing  # before the forward of a microbatch
    skips: bool = False  # trainable parameters may get no gradient


def _toy(order: tuple[int, ...], **settings: Any) -> BuiltModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = Toy(order=order, **settings)
        return BuiltModel(module, ["blocks.0", "blocks.1", "blocks.2"])


class FrozenNorm(Toy):
    """As a pretrained backbone is fine-tuned: its BatchNorm keeps the statistics it came with."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH).requires_grad_(False).eval()
        self.statistics.running_mean.fill_(0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(self.statistics(x.flatten(0, 1)).view_as(x))


def _frozen_norm() -> BuiltModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return BuiltModel(FrozenNorm(), ["blocks.0", "blocks.1", "blocks.2"])


def _configured(family: str, **settings: int | bool) -> BuiltModel:
    key = "moe" if family == "moe" else "hf_config"
    return build_model(ModelConfig(family=family, **{key: settings}), seed=1)


_llama = partial(
    _configured,
    "llama",
    vocab_size=VOCABULARY,
    hidden_size=12,
    intermediate_size=10,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=SEQ_LEN,
    tie_word_embeddings=True,
)
_gpt2 = partial(
    _configured,
    "gpt2",
    vocab_size=VOCABULARY,
    n_embd=12,
    n_layer=2,
    n_head=2,
    n_positions=SEQ_LEN,
    bos_token_id=0,
    eos_token_id=0,
    attn_pdrop=0,
    embd_pdrop=0,
    resid_pdrop=0,
)
_mixtral = partial(
    _configured,
    "mixtral",
    vocab_size=VOCABULARY,
    hidden_size=16,  # its grouped matrix product wants rows of whole 16 bytes
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=3,
    num_experts_per_tok=1,
    max_position_embeddings=SEQ_LEN,
    tie_word_embeddings=True,
)
_moe = partial(
    _configured,
    "moe",
    vocab_size=VOCABULARY,
    width=6,
    depth=2,
    num_heads=2,
    num_experts=3,
    top_k=1,
    max_positions=SEQ_LEN,
)


def allow_experts(model: nn.Module, experts: Iterable[int] | None) -> None:
    """Allow only these experts in every block from now on; None allows all, () skips all."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.allowed = None if experts is None else tuple(experts)


def _skip_on_one_rank(model: nn.Module, step: int, microbatch: int, rank: int) -> None:
    allow_experts(model, () if rank == 0 else (0, 1, 2))


def _skip_on_all_ranks(model: nn.Module, step: int, microbatch: int, rank: int) -> None:
    allow_experts(model, (1,))


def _skip_by_turns(model: nn.Module, step: int, microbatch: int, rank: int) -> None:
    allow_experts(model, ((step + microbatch + rank) % 3,))


MODELS: dict[str, TestModel] = {
    "toy": TestModel(partial(_toy, (0, 1, 2)), skips=True),
    "words": TestModel(partial(_toy, (0, 1, 2), vocabulary=MANY_WORDS), skips=True),
    "large": TestModel(partial(_toy, (0, 1, 2), width=400, inner=13), skips=True),
    "reused": TestModel(partial(_toy, (0, 1, 0, 2)), skips=True),
    "dropout": TestModel(partial(_toy, (0, 1, 2), dropout=0.5), skips=True),
    "frozen_norm": TestModel(_frozen_norm, skips=True),
    "llama": TestModel(_llama),
    "gpt2": TestModel(_gpt2),
    "mixtral": TestModel(_mixtral),
    "moe_one_rank": TestModel(_moe, _skip_on_one_rank, skips=True),
    "moe_all_ranks": TestModel(_moe, _skip_on_all_ranks, skips=True),
    "moe_by_turns": TestModel(_moe, _skip_by_turns, skips=True),
}


def microbatch_of(step: int, microbatch: int, rank: int) -> tuple[Tensor, Tensor]:
    """(input_ids, labels), [SAMPLES, SEQ_LEN] each; how many labels count differs from one to the next."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    tokens = torch.randint(VOCABULARY, (SAMPLES, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, : (step + microbatch + rank) % SEQ_LEN] = IGNORED
    return tokens[:, :-1], labels


@cache
def num_valid(step: int, accumulation: int, world_size: int) -> int:
    """Labels that count, of all ranks and microbatches of the step."""
    batches = [(m, r) for m in range(accumulation) for r in range(world_size)]
    return sum(int((microbatch_of(step, m, r)[1] != IGNORED).sum()) for m, r in batches)
