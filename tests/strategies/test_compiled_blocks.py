"""`train.compile`: each block is one graph, under every engine, and the weights are those of one process without it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engines import FLOAT32_ROUNDING, NATIVE
from tests.oracle import Make, Recipe, assert_same, outcome_of, train_on_ranks, train_oracle
from tests.strategies.engine import Ours
from zeroexp.config.keys import TrainConfig
from zeroexp.interface.strategy import Strategy
from zeroexp.models.checkpointing import checkpoint_as_configured
from zeroexp.models.compiled_blocks import compile_as_configured, graphs_compiled
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World
from zeroexp.zero.options import Options

COMPILED = TrainConfig(compile=True)
RECOMPUTED = TrainConfig(compile=True, activation_checkpointing=True)
KEPT = TrainConfig(compile=True, activation_checkpointing=True, recompute_except=["aten.mm"])


@dataclass(frozen=True)
class Compiled:
    """Makes an engine around blocks that are compiled."""

    make: Make
    train: TrainConfig
    backend: str = "inductor"

    def __call__(self, built: BuiltModel, recipe: Recipe, world: World) -> Strategy:
        checkpoint_as_configured(built.module, built.blocks, self.train)
        with mock.patch.object(torch, "compile", partial(torch.compile, backend=self.backend)):
            compile_as_configured(built.module, built.blocks, self.train)
        return self.make(built, recipe, world)


def ours(stage: str, layout: str, train: TrainConfig = COMPILED) -> Compiled:
    return Compiled(Ours(stage, Options(layout=layout)), train)


# Before every change: the graphs, without 40 s of torch's compiler of kernels on every rank.
QUICK = {"zero3 buffer": replace(ours("zero3", "buffer"), backend="aot_eager")}
OTHERS = {
    "zero3 buffer": ours("zero3", "buffer"),
    "zero3 tensor": ours("zero3", "tensor"),
    "zero3 parameter, recomputed": ours("zero3", "parameter", RECOMPUTED),
    "zero3 buffer, products kept": ours("zero3", "buffer", KEPT),
    "zero2 parameter": ours("zero2", "parameter"),
    "zero1 tensor": ours("zero1", "tensor"),
    "ddp buffer": ours("ddp", "buffer"),
    **{
        name: Compiled(NATIVE[name].make, COMPILED)
        for name in ("ddp", "ddp_zero_redundancy", "fsdp2")
    },
}


def train(world: World, recipe: Recipe, makes: list[Compiled]) -> list[Any]:
    """Train under each engine; beside what it trained, how often it compiled and broke off."""
    warnings.simplefilter("ignore")  # the compiler warns of code of its own
    answers: list[Any] = []
    for make in makes:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        answers.append((train_on_ranks(world, recipe, make), graphs_compiled()))
    return answers


@pytest.mark.parametrize("makes", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=len)
def test_each_block_is_one_graph_and_the_weights_are_the_same(ranks, makes) -> None:
    recipe = Recipe(model="llama", fused=True)
    by_rank = ranks(train, recipe, list(makes.values()))
    for index, name in enumerate(makes):
        outcomes, counts = zip(*(answers[index] for answers in by_rank), strict=True)
        assert counts == ({"graphs": 1, "graph_breaks": 0},) * 2, name
        assert_same(outcome_of(outcomes), train_oracle(recipe), atol=FLOAT32_ROUNDING)
