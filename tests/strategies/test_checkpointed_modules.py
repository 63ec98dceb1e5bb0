"""Each family of shipped models, shrunk, with its units inside the blocks that recompute themselves.

`strategy.unit=module train.activation_checkpointing=true`: the forward of a module runs twice, the second time in
backward, where its unit is gathered already or has to be once more. One process that does the obvious thing, without
recomputing anything, arrives at the same weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle import Recipe, assembled, pieces_of
from tests.shrunk import loss_of, shrunk
from tests.strategies.engine import Ours
from zeroexp.config.keys import TrainConfig
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.interface.strategy import CanonicalState
from zeroexp.models.checkpointing import checkpoint_as_configured
from zeroexp.models.module import BuiltModel, build_model
from zeroexp.process.world import World
from zeroexp.zero.options import Options

RANKS, STEPS, MICROBATCHES = 2, 2, 2

# One of each family, one that is not tied, and one with another head.
SHIPPED = [
    "tiny",
    "llama_7b",
    "gpt2_tiny",
    "mixtral_tiny",
    "moe_tiny",
    "mlp_tiny",
    "smollm2_360m_yelp",
]
FAMILIES = ("tiny", "gpt2_tiny", "mixtral_tiny", "moe_tiny")
BEFORE_A_CHANGE = [("tiny", "zero1"), *((name, "zero3") for name in FAMILIES[::2])]
# A product with a matrix of one row (one token alone with its expert) is rounded by where in memory the weights lie.
TOLERANCE = {"moe_tiny": 2e-5, "mixtral_tiny": 2e-5}


RECOMPUTES = TrainConfig(activation_checkpointing=True)


def built(name: str) -> BuiltModel:
    return build_model(shrunk(name, num_layers=2), seed=1)


def loss_in_step(model: Callable[..., Any], name: str, step: int, index: int, rank: int) -> Tensor:
    total, number = loss_of(model, shrunk(name, num_layers=2), step, index, rank)
    return total / (number * MICROBATCHES * RANKS)


@cache
def oracle(name: str) -> dict[str, Tensor]:
    """Gradients summed as ranks do it: each rank's microbatches by themselves, then the ranks in order."""
    module, config = built(name).module, Recipe().optimizer_config()
    optimizer = optimizer_factory(config)(parameter_groups(module, config, []))
    for step in range(STEPS):
        summed: dict[torch.nn.Parameter, Tensor] = {}
        for rank in range(RANKS):
            for index in range(MICROBATCHES):
                loss_in_step(module, name, step, index, rank).backward()
            for p in module.parameters():
                if p.grad is not None:
                    summed[p] = summed[p] + p.grad if p in summed else p.grad
                p.grad = None
        for p, gradient in summed.items():
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in module.named_parameters()}


def train(
    world: World, name: str, make: Ours, recomputation: TrainConfig = RECOMPUTES
) -> CanonicalState:
    model = built(name)
    checkpoint_as_configured(model.module, model.blocks, recomputation)
    strategy = make(model, Recipe(), world)
    for step in range(STEPS):
        for index in range(MICROBATCHES):
            with strategy.microbatch(last=index == MICROBATCHES - 1):
                strategy.backward(loss_in_step(strategy.model, name, step, index, world.rank))
        strategy.step()
        strategy.zero_grad()
    return pieces_of(strategy)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(
            name, stage, marks=[] if (name, stage) in BEFORE_A_CHANGE else pytest.mark.slow
        )
        for name in SHIPPED
        for stage in ("zero1", "zero2", "zero3")
    ],
)
def test_units_inside_blocks_that_recompute_equal_the_oracle(ranks, name, stage):
    make = Ours(stage, Options(layout="buffer", unit="module", reduce_each="step"))
    state = assembled(ranks(train, name, make, world_size=RANKS))
    bound = TOLERANCE.get(name, 0.0)
    for key, expected in oracle(name).items():
        torch.testing.assert_close(
            state[key]["weight"],
            expected,
            rtol=bound,
            atol=bound,
            msg=lambda text, where=key: f"{where}: {text}",
        )


@pytest.mark.parametrize(
    ("unit", "selective"),
    [
        ("module", {"recompute_every": 2}),
        ("block", {"recompute_except": ["aten.mm:2", "aten.silu.default"]}),
    ],
)
def test_blocks_that_recompute_a_part_equal_the_oracle(ranks, unit, selective):
    make = Ours("zero3", Options(layout="buffer", unit=unit, reduce_each="step"))
    recomputation = replace(RECOMPUTES, **selective)
    state = assembled(ranks(train, "tiny", make, recomputation, world_size=RANKS))
    for key, expected in oracle("tiny").items():
        assert torch.equal(state[key]["weight"], expected), key


def test_an_operator_that_is_kept_runs_once_and_every_other_block_is_left_as_it_is():
    """Of two blocks: products run in forward alone where they are kept, twice where they are recomputed."""
    counts: dict[str, int] = {}
    for case, selective in {
        "all": {},
        "second": {"recompute_every": 2},
        "kept": {"recompute_except": ["aten.mm"]},
        "every other": {"recompute_except": ["aten.mm:2"]},
    }.items():
        model = built("tiny")
        checkpoint_as_configured(model.module, model.blocks, replace(RECOMPUTES, **selective))
        with Counting() as counting:
            loss_of(model.module, shrunk("tiny", num_layers=2), 0, 0, 0)[0].backward()
        counts[case] = counting.products
    plain = built("tiny").module
    with Counting() as counting:
        loss_of(plain, shrunk("tiny", num_layers=2), 0, 0, 0)[0].backward()
    assert counts["kept"] == counting.products
    # Of the seven in each block (q, k, v, o, gate, up, down) the second, fourth and sixth run twice.
    assert counts["every other"] == counting.products + 2 * 3
    assert counts["all"] - counting.products == 2 * (counts["second"] - counting.products) > 0


class Counting(TorchDispatchMode):
    """The number of products of matrices."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))
