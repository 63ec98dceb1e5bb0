"""One rank asks its backend for nothing, and launches what a plain loop launches, whatever the stage and layout.

A group of one rank (as many replicas as ranks) meets the others in outer steps alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.growth import Dispatched
from tests.comm.asked import asking
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process.world import World, fake_world, joined_process_group
from zeroexp.zero.options import Dtypes, Options, OuterOptimizer

# Each stage, and each layout under the one that cuts everything.
CASES = [*((stage, "buffer") for stage in STAGES), ("zero3", "parameter"), ("zero3", "tensor")]
WIDTH, MICROBATCHES = 8, 2
FLOAT32 = Dtypes(torch.float32, torch.float32, torch.float32)
BF16_MASTER = Dtypes(torch.bfloat16, torch.float32, torch.float32)


def make_model(num_layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    model[1].bias.requires_grad_(False)
    return model


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, foreach=True)


def engine(
    world: World,
    stage: str,
    layout: str,
    model: nn.Sequential | None = None,
    dtypes: Dtypes = FLOAT32,
    clip: float | None = None,
    group: dict[str, Any] | None = None,
    **options: object,
) -> Sharded:
    model = model or make_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    return Sharded(
        model,
        blocks=[str(index) for index in range(1, len(model) - 1)],
        stage=STAGES[stage],
        param_groups=[{"params": trained, **(group or {})}],
        optimizer_factory=make_optimizer,
        world=world,
        dtypes=dtypes,
        max_grad_norm=clip,
        options=Options(layout=layout, transport="native", **options),
    )


def inputs_of(step: int, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.manual_seed(10 * step + index)
    return torch.randn(3, WIDTH, generator=drawn).to(dtype)


def take_step(strategy: Sharded, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    for index in range(MICROBATCHES):
        with strategy.microbatch(last=index == MICROBATCHES - 1):
            output = strategy.model(inputs_of(step, index, dtype))
            strategy.backward(output.float().square().sum())
    norm = strategy.step()
    strategy.zero_grad()
    return norm


class Plain:
    """The loop without any engine, with the weights of the optimizer beside the model's where dtypes ask for it."""

    def __init__(self, model: nn.Sequential, dtypes: Dtypes, clip: float | None):
        self._dtypes, self._clip = dtypes, clip
        trained = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().clone() for p in trained]
        self.model = model.to(dtypes.compute)
        self._trained = trained
        for parameter in trained:
            parameter.grad_dtype = dtypes.reduce
        self._optimizer = make_optimizer(self.masters)

    def take_step(self, step: int) -> Tensor:
        for index in range(MICROBATCHES):
            output = self.model(inputs_of(step, index, self._dtypes.compute))
            output.float().square().sum().backward()
        gradients = [p.grad for p in self._trained if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        if self._clip is not None:
            nn.utils.clip_grads_with_norm_(self.masters, self._clip, norm)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([p.detach() for p in self._trained], self.masters)
        for parameter in self._trained:
            parameter.grad = None
        return norm


@pytest.mark.parametrize(
    ("dtypes", "clip"),
    [(FLOAT32, None), (BF16_MASTER, None), (FLOAT32, 0.5)],
    ids=["fp32", "bf16_master", "clipped"],
)
@pytest.mark.parametrize(("stage", "layout"), CASES)
def test_one_rank_trains_as_a_plain_loop_and_asks_its_backend_for_nothing(
    stage, layout, dtypes, clip
):
    plain, off = Plain(make_model(), dtypes, clip), 0.0 if clip is None else 1e-5
    with fake_world(0, 1) as world, asking() as asked:
        strategy = engine(world, stage, layout, dtypes=dtypes, clip=clip)
        for step in range(3):
            norm = take_step(strategy, step, dtypes.compute)
            assert norm.item() == pytest.approx(plain.take_step(step).item(), rel=1e-5)
            assert clip is None or norm > clip
        weights = dict(strategy.model.named_parameters())
        for name, parameter in plain.model.named_parameters():
            torch.testing.assert_close(
                weights[name].detach(), parameter.detach(), rtol=off, atol=off
            )
        assert asked.launches == []
        assert strategy.wire.take_traffic().calls_by_kind == {}


def test_what_several_ranks_refuse_trains_as_in_a_plain_loop():
    """A backward that comes again, one of its own beside the engine's, and one after the microbatch."""

    def backward_once(model: nn.Module, index: int) -> Tensor:
        loss = model(inputs_of(0, index)).square().sum()
        loss.backward(retain_graph=True)
        return loss

    with fake_world(0, 1) as world:
        strategy = engine(world, "zero3", "buffer")
        plain = make_model()
        optimizer = make_optimizer([p for p in plain.parameters() if p.requires_grad])
        for index in range(2):
            with strategy.microbatch(last=True):
                strategy.backward(backward_once(strategy.model, index))
            strategy.model(inputs_of(1, index)).sum().backward()
            strategy.step()
            strategy.zero_grad()
            backward_once(plain, index).backward()
            plain(inputs_of(1, index)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(strategy.model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.detach(), theirs.detach())


def launches_of_four_steps(world: World, every: int) -> list[int]:
    """How often each step asks the backend, of ranks that shard with nobody and meet every so many steps."""
    options = {"replicas": world.size, "outer": OuterOptimizer(every)}
    strategy = engine(world, "zero3", "buffer", **options)
    take_step(strategy, 0)
    counts = []
    for step in range(1, 4):
        with asking() as asked:
            take_step(strategy, step)
        counts.append(len(asked.launches))
    return counts


def test_groups_of_one_rank_ask_in_outer_steps_alone():
    """Steps 2 and 4 are outer ones: one sum for each unit, the root among them."""
    with fake_world(1, 3) as world:
        assert launches_of_four_steps(world, every=2) == [3, 0, 3]


def operations(take_step: Callable[[int], Tensor]) -> Counter[str]:
    for step in range(2):
        take_step(step)
    with Dispatched() as dispatched:
        take_step(2)
    return dispatched.counts


@pytest.mark.parametrize(("stage", "layout"), CASES)
def test_more_layers_launch_no_more_beside_those_of_a_plain_loop(stage, layout):
    """What the engine launches beyond the loop is for the step as a whole, however many layers there are."""
    beyond = []
    for num_layers in (4, 24):
        plain = operations(Plain(make_model(num_layers), FLOAT32, clip=1.0).take_step)
        with fake_world(0, 1) as world:
            strategy = engine(world, stage, layout, make_model(num_layers), clip=1.0)
            mine = operations(partial(take_step, strategy))
        beyond.append(mine - plain)
    assert beyond[0] == beyond[1]


@pytest.mark.parametrize("stage", ["ddp", "zero3"])
def test_a_parameter_that_is_given_other_memory_is_refused(stage):
    """The engine would go on with the weights that it laid out, and the model with those that nobody updates."""
    with joined_process_group() as world:
        strategy = engine(world, stage, "buffer")
        strategy.model.get_parameter("2.weight").data = torch.ones(WIDTH, WIDTH)
        with (
            pytest.raises(RuntimeError, match=r"parameter 2\.weight was moved or given other"),
            strategy.microbatch(last=True),
        ):
            pass


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm])
def test_a_recurrent_cell_makes_its_list_of_weights_anew(wrap):
    """Before its first forward the list holds the memory of the weight that is parametrized."""
    with joined_process_group() as world:
        model = nn.Sequential(wrap(nn.LSTM(WIDTH, WIDTH), "weight_hh_l0"))
        weights = {name: each.detach().clone() for name, each in model.named_parameters()}
        strategy = engine(world, "zero3", "buffer", model)
        with strategy.microbatch(last=True):
            strategy.backward(strategy.model(torch.ones(1, WIDTH))[0].sum())
        strategy.step()
        assert not any(torch.equal(model.get_parameter(n), each) for n, each in weights.items())
