"""Models and engines drawn by chance: plain data that travels to the ranks, and builds there what it says.

    tokens -> embedding -> blocks in some order, some twice, some inside others -> norm -> head -> logits

Every block may be frozen in part, hold a parameter that nobody uses or that is used by turns (by step, microbatch and
rank), share its weight with another block, and hold a block of its own, which moves by itself too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models_for_tests import MANY_WORDS, MODELS, VOCABULARY, TestModel
from tests.oracle import PRECISIONS, Outcome, Recipe, Rules, train_on_ranks, train_oracle
from tests.strategies.engine import Ours
from zeroexp.cut.stage import STAGES
from zeroexp.interface.strategy import CanonicalState
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World
from zeroexp.zero.options import MIB, Options

MISSING = (
    "skip"  # what a parameter gets of which no rank has a gradient: zeros | skip (tests/oracle.py)
)


@dataclass(frozen=True)
class DrawnBlock:
    hidden: int
    bias: bool
    frozen: str  # "" | up | all
    unused: int  # elements of a parameter that nobody uses; 0: there is none
    by_turns: bool  # a scale that is used by turns
    inner: DrawnBlock | None = None

    def build(self, width: int) -> Block:
        return Block(self, width)


@dataclass(frozen=True)
class DrawnModel:
    width: int
    vocabulary: int
    blocks: tuple[DrawnBlock, ...]
    order: tuple[int, ...]  # in which they run
    tied: bool  # embedding and head
    shared: bool  # the weights `up` of the first block and of the last, which are as large
    frozen_embedding: bool
    unused: int

    def build(self) -> BuiltModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            module = Model(self)
        names = [name for name, each in module.named_modules() if isinstance(each, Block)]
        return BuiltModel(module, names)


@dataclass(frozen=True)
class Drawn:
    """A model, how it is trained and by which engine."""

    model: DrawnModel
    recipe: Recipe
    engine: Ours

    @property
    def rules(self) -> Rules:
        return Rules(self.engine.options.reduce_each, missing=MISSING)


class Block(nn.Module):
    def __init__(self, drawn: DrawnBlock, width: int) -> None:
        super().__init__()
        self.inner = drawn.inner.build(width) if drawn.inner else None
        self.up = nn.Linear(width, drawn.hidden, bias=drawn.bias)
        self.down = nn.Linear(drawn.hidden, width, bias=False)
        if drawn.unused:
            self.unused = nn.Parameter(torch.ones(drawn.unused))
        self.scale = nn.Parameter(torch.full((width,), 0.5)) if drawn.by_turns else None
        self.scales = False
        for parameter in {"": [], "up": self.up.parameters(), "all": self.parameters()}[
            drawn.frozen
        ]:
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            x = self.inner(x)
        y = self.down(torch.tanh(self.up(x)))
        return x + (y * self.scale if self.scale is not None and self.scales else y)


class Model(nn.Module):
    def __init__(self, drawn: DrawnModel) -> None:
        super().__init__()
        width, words = drawn.width, drawn.vocabulary
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(each.build(width) for each in drawn.blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.order = drawn.order
        if drawn.unused:
            self.unused = nn.Parameter(torch.ones(drawn.unused))
        self.embedding.weight.requires_grad_(not drawn.frozen_embedding)
        if drawn.tied:
            self.head.weight = self.embedding.weight
        if drawn.shared:
            self.blocks[-1].up.weight = self.blocks[0].up.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = x + x.cumsum(1) / 6
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(self.norm(x))


def take_turns(model: nn.Module, step: int, microbatch: int, rank: int) -> None:
    for index, block in enumerate(each for each in model.modules() if isinstance(each, Block)):
        block.scales = (step + microbatch + rank + index) % 2 == 0


def train(world: World, drawn: Drawn) -> tuple[Outcome, CanonicalState]:
    """On one rank."""
    _register(drawn)
    return train_on_ranks(world, drawn.recipe, drawn.engine)


def oracle(drawn: Drawn) -> Outcome:
    _register(drawn)
    return train_oracle(drawn.recipe, drawn.rules)


def _register(drawn: Drawn) -> None:
    MODELS[drawn.recipe.model] = TestModel(drawn.model.build, take_turns, skips=True)


# -- by chance ----------------------------------------------------------------------------------------

small = st.integers(0, 3)


@st.composite
def blocks(draw: Any, *, may_nest: bool = True) -> DrawnBlock:
    nests = may_nest and draw(st.integers(0, 3)) == 0
    return DrawnBlock(
        hidden=draw(st.integers(1, 9)),
        bias=draw(st.booleans()),
        frozen=draw(st.sampled_from(["", "", "", "up", "all"])),
        unused=draw(small),
        by_turns=draw(st.booleans()),
        inner=draw(blocks(may_nest=False)) if nests else None,
    )


@st.composite
def models(draw: Any) -> DrawnModel:
    chosen = tuple(draw(st.lists(blocks(), min_size=1, max_size=4)))
    shared = draw(st.booleans())
    if shared:
        chosen = (*chosen[:-1], replace(chosen[-1], hidden=chosen[0].hidden))
    order = list(draw(st.permutations(range(len(chosen)))))
    order += draw(st.lists(st.sampled_from(order), max_size=1))  # one runs twice
    return DrawnModel(
        width=draw(st.integers(2, 7)),
        vocabulary=draw(st.sampled_from([VOCABULARY, MANY_WORDS])),
        blocks=chosen,
        order=tuple(order),
        tied=draw(st.booleans()),
        shared=shared,
        frozen_embedding=draw(st.integers(0, 3)) == 0,
        unused=draw(small),
    )


@st.composite
def drawn(draw: Any, *, max_world_size: int = 4) -> Drawn:
    """What equals the oracle bit for bit, see tests/strategies/test_parity.py for what does not."""
    stage, world_size = draw(st.sampled_from(list(STAGES))), draw(st.integers(1, max_world_size))
    precision = draw(st.sampled_from(["fp32", "bf16", "bf16_master", "paper16"]))
    may_cut_sgd = PRECISIONS[precision].master == "float32"
    bucket_bytes = draw(st.sampled_from([None, 1, 30, 200, 1 << 20]))
    options = Options(
        layout=draw(st.sampled_from(["parameter", "tensor", "buffer"])),
        owners=draw(st.sampled_from(["contiguous", "greedy"])),
        unit=draw(st.sampled_from(["block", "layer", "module", "model"])),
        overlap=draw(st.booleans()),
        prefetch=draw(st.sampled_from([None, 0, 1, 2, 3])),
        keep=draw(st.sampled_from(["last", "none", "all"])),
        reduce_each="step" if stage == "zero1" else draw(st.sampled_from(["step", "microbatch"])),
        bucket_mb=bucket_bytes and bucket_bytes / MIB,
        transport=draw(
            st.sampled_from(["direct", "gloo", *(["native"] if world_size < 3 else [])])
        ),
    )
    recipe = Recipe(
        model="drawn",
        world_size=world_size,
        steps=2,
        accumulation=draw(st.integers(1, 3)),
        precision=precision,
        optimizer=draw(st.sampled_from(["adamw", "sgd"] if may_cut_sgd else ["adamw"])),
    )
    model = draw(models())
    return Drawn(model, recipe, Ours(stage, options))
