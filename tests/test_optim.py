"""The optimizer: which parameters decay, the update itself, and the learning rate of every step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn, optim

from tests.composing import composed
from zeroexp.config.keys import ConfigError, OptimizerConfig
from zeroexp.config.optimizer import OPTIMIZERS, optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.interface.fused_kernels import fused_is_right
from zeroexp.training.learning_rate import learning_rate

CONFIG = OptimizerConfig(weight_decay=0.1)


class Tied(nn.Module):
    """An embedding whose weight is the head's, a norm, a bias, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.head = nn.Linear(4, 8)
        self.head.weight = self.embedding.weight


def test_norms_and_biases_do_not_decay_and_tied_weights_come_once():
    model = Tied()
    matrices, vectors = parameter_groups(model, CONFIG, [])
    assert [id(p) for p in matrices["params"]] == [id(model.embedding.weight)]
    assert {id(p) for p in vectors["params"]} == {
        id(model.norm.weight),
        id(model.norm.bias),
        id(model.head.bias),
    }
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize(
    "config", [replace(CONFIG, decay_norms_and_biases=True), replace(CONFIG, weight_decay=0.0)]
)
def test_without_a_difference_there_is_one_group(config):
    (group,) = parameter_groups(Tied(), config, [])
    assert len(group["params"]) == 4
    assert group["weight_decay"] == config.weight_decay


def test_a_model_without_vectors_has_no_empty_group():
    (group,) = parameter_groups(nn.Linear(3, 3, bias=False), CONFIG, [])
    assert len(group["params"]) == 1


def stepped(config: OptimizerConfig, start: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    """`start` after one step per row of `grads`."""
    weight = nn.Parameter(start.clone())
    groups = [{"params": [weight], "weight_decay": config.weight_decay}]
    optimizer = optimizer_factory(config)(groups)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_is_the_published_update(fused):
    config = OptimizerConfig(lr=0.02, betas=[0.8, 0.9], eps=1e-3, weight_decay=0.3, fused=fused)
    random = torch.Generator().manual_seed(0)
    start = torch.randn(6, 5, dtype=torch.float64, generator=random)
    grads = torch.randn(4, 6, 5, dtype=torch.float64, generator=random)
    expected, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, grad in enumerate(grads, start=1):
        m, v = 0.8 * m + 0.2 * grad, 0.9 * v + 0.1 * grad**2
        update = (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
        expected = expected * (1 - 0.02 * 0.3) - 0.02 * update
    torch.testing.assert_close(stepped(config, start, grads), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_sgd_with_momentum_and_decay(fused):
    config = OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.2, fused=fused)
    random = torch.Generator().manual_seed(0)
    start = torch.randn(7, dtype=torch.float64, generator=random)
    grads = torch.randn(3, 7, dtype=torch.float64, generator=random)
    expected, velocity = start.clone(), torch.zeros_like(start)
    for grad in grads:
        velocity = 0.9 * velocity + grad + 0.2 * expected
        expected = expected - 0.1 * velocity
    torch.testing.assert_close(stepped(config, start, grads), expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_of_16_bits_is_the_loop(dtype, momentum):
    """torch 2.13's fused kernel for CPUs leaves all full vectors of such weights as they are."""
    config = OptimizerConfig(name="sgd", lr=0.125, momentum=momentum, weight_decay=0.0)
    start, grads = (
        torch.ones(70, dtype=dtype),
        torch.arange(210).view(3, 70).remainder(5).add(1).to(dtype),
    )
    moved = stepped(config, start, grads)
    assert torch.equal(moved, stepped(replace(config, fused=False), start, grads))
    assert (moved != start).all()


def test_fused_kernels_that_are_right_are_taken():
    weights = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    config = OptimizerConfig(name="sgd", momentum=0.9)
    assert optimizer_factory(config)(weights).defaults["fused"]
    assert optimizer_factory(config)([nn.Parameter(weights[0].to("meta"))]).defaults["fused"]
    kernels = (optim.Adagrad, optim.Adam, optim.AdamW)
    assert all(fused_is_right(kind, weights[0].bfloat16()) for kind in kernels)


@pytest.mark.parametrize(("name", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adamw", 0.9)])
def test_a_plan_counts_the_moments_that_the_optimizer_makes(name, momentum):
    config = OptimizerConfig(name=name, momentum=momentum)
    weight = nn.Parameter(torch.ones(3))
    optimizer = optimizer_factory(config)([{"params": [weight]}])
    weight.grad = torch.ones(3)
    optimizer.step()
    kept = [each for each in optimizer.state[weight].values() if isinstance(each, torch.Tensor)]
    moments = [each for each in kept if each.shape == weight.shape]
    assert len(moments) == OPTIMIZERS[name].num_moments(config)


def test_an_unknown_word_is_one_line():
    with pytest.raises(
        ConfigError, match=r"^optimizer.name=adam: unknown word; use optimizer=adamw"
    ):
        optimizer_factory(OptimizerConfig(name="adam"))


def rates(schedule: str, *, warmup: int, total: int) -> list[float]:
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=warmup, min_lr_ratio=0.1)
    return [learning_rate(config, step, total) for step in range(total)]


def test_schedules_step_by_step():
    assert rates("constant", warmup=4, total=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates("linear", warmup=2, total=5) == pytest.approx([0.5, 1.0, 0.7, 0.4, 0.1])
    half = 0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2
    assert rates("cosine", warmup=0, total=3) == pytest.approx([1.0, half, 0.1])
    assert rates("linear", warmup=0, total=2) == pytest.approx([1.0, 0.1])


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (1, 1), (3, 3), (5, 3), (0, 50), (7, 50)])
def test_rates_rise_then_fall_within_their_bounds(schedule, warmup, total):
    values = rates(schedule, warmup=warmup, total=total)
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert all(0 < value <= 1 for value in values)


def test_the_rate_after_the_last_step_stays_at_its_end():
    config = OptimizerConfig(lr=2.0, schedule="cosine", min_lr_ratio=0.25)
    assert learning_rate(config, 1000, 10) == pytest.approx(0.5)


def test_settings_of_muons_yaml_are_those_of_whoever_names_none():
    assert composed("optimizer=muon").optimizer.settings == OPTIMIZERS["muon"].settings
