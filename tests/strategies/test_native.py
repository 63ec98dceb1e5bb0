"""Models, groups and skipped modules under torch's engines, and what their labels say.

What they hold: tests/plan/test_torch_closed_forms.py.
"""

from __future__ import annotations

import tracemalloc
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.crossed import crossed, every_nth
from tests.engines import HSDP, NATIVE, check
from tests.models_for_tests import MODELS
from tests.oracle import Recipe, assembled, build_on_rank, configured, pieces_of, run_steps
from tests.ranks import RankError
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.engines import torch_fsdp2
from zeroexp.engines.torch_ddp import TorchDDP
from zeroexp.engines.torch_fsdp2 import TorchFSDP2
from zeroexp.interface.canonical import merge
from zeroexp.interface.fused_kernels import fused_is_right
from zeroexp.interface.overlapping_memory import _attributes
from zeroexp.interface.strategy import CanonicalState, Strategy
from zeroexp.models.deferred import defer
from zeroexp.process.world import World, gather_objects

LABELS = {
    "ddp": "everything replicated",
    "zero1": "gradients replicated",
    "zero2": "parameters rest sharded",
    "zero3": "everything rests sharded",
}


def labels(world: World) -> list[str]:
    makes = [configured(stage, "torch") for stage in LABELS]
    return [build_on_rank(world, Recipe(), make).settings["engine"] for make in makes]


def test_settings_say_what_rests_where(ranks):
    for told in ranks(labels):
        assert all(label in each for label, each in zip(LABELS.values(), told, strict=True))


@every_nth(
    2,
    "engine, model",
    [("ddp", "gpt2"), ("fsdp2_no_reshard", "mixtral"), ("fsdp2", "llama"), ("fsdp2", "gpt2")],
)
def test_models_of_transformers(ranks, engine, model):
    check(ranks, NATIVE[engine], Recipe(model=model))


def fsdp2(
    module: nn.Module, world: World, factory: Any = torch.optim.SGD, lr: float = 0.1, **shape: Any
) -> TorchFSDP2:
    """Of all parameters in one group."""
    words: Any = {"blocks": [], "reshard_after_forward": True, **shape}
    groups, make = [{"params": [*module.parameters()]}], partial(factory, lr=lr)
    return TorchFSDP2(module, param_groups=groups, optimizer_factory=make, world=world, **words)


class TiedWithABias(nn.Module):
    """A head that shares its weight with the embedding, and has a bias of its own, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.block = nn.Embedding(8, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 8)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(self.embedding(words))))


def train_tied(world: World, stage: str) -> dict[str, dict[str, Tensor]]:
    model = TiedWithABias()
    shape = {"blocks": ["block"], "unit": "layer", "reshard_after_forward": stage == "zero3"}
    strategy = fsdp2(model, world, lr=0.01, **shape)
    for _ in range(3):
        with strategy.microbatch(last=True):
            strategy.backward(model(torch.arange(8)[world.rank :: world.size]).square().sum())
        strategy.step()
        strategy.zero_grad()
    return assembled([*gather_objects(pieces_of(strategy))])


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_fsdp2_by_layers_ties_a_head_that_has_a_bias_of_its_own(ranks, stage):
    plain = TiedWithABias()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(3):
        plain(torch.arange(8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in ranks(train_tied, stage):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(weights[name]["weight"], parameter.detach())


def start_of_other_weights(world: World) -> tuple[CanonicalState, Tensor]:
    torch.manual_seed(world.rank)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module[1].running_mean = torch.full((4,), float(world.rank))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ranks start from different weights")
        strategy = fsdp2(module, world)
    return pieces_of(strategy), module[1].running_mean


def test_fsdp2_starts_from_the_weights_and_buffers_of_rank_0(ranks):
    """Else each rank would keep its rows of another model."""
    pieces, buffers = zip(*ranks(start_of_other_weights), strict=True)
    torch.manual_seed(0)
    assert torch.equal(assembled(pieces)["0.weight"]["weight"], nn.Linear(4, 4).weight.detach())
    assert all(torch.equal(each, torch.zeros(4)) for each in buffers)


class KeepsAView(nn.Linear):
    """Computes with a view of its weight that the constructor made."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.kept = [self.weight.detach()]

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.kept[0].sum()


def train_what_keeps_a_view(world: World, engine: Any, is_deferred: bool) -> None:
    module, values = nn.Sequential(KeepsAView()), None
    if is_deferred:
        module, values = defer(lambda: nn.Sequential(KeepsAView()), 0, lambda made: made)
    groups, factory = [{"params": [*module.parameters()]}], partial(torch.optim.SGD, lr=0.1)
    engine(module, world=world, param_groups=groups, optimizer_factory=factory, values=values)


FSDP2_OF_ONE = partial(TorchFSDP2, blocks=["0"], reshard_after_forward=True)


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("engine", [TorchDDP, FSDP2_OF_ONE], ids=["ddp", "fsdp2"])
def test_a_view_that_would_keep_the_first_weights_is_refused(ranks, engine, is_deferred):
    with pytest.raises(RankError, match=r"0\.weight and attribute 0\.kept lie in the same memory"):
        ranks(partial(train_what_keeps_a_view, engine=engine, is_deferred=is_deferred))


def test_what_modules_share_is_looked_at_once():
    """Hooks of 200 modules lead to one recorder of a trace."""
    module, shared = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3))), [torch.ones(2)]
    for each in module:
        each.register_forward_hook(lambda *_: shared.clear())
    names = [name for _, name, each in _attributes(module) if each is shared[0]]
    assert names == ["0._forward_hooks"]


def test_numbers_in_an_attribute_take_no_memory_of_their_own():
    module = nn.Linear(1, 1)
    module.tokens = list(range(1_000_000))
    tracemalloc.start()
    try:
        assert len([*_attributes(module)]) == 2  # its weight and bias
        assert tracemalloc.get_traced_memory()[1] < 20_000_000  # a list of them
    finally:
        tracemalloc.stop()


def train_with_a_fused_kernel(world: World, shard_optimizer: bool) -> str:
    module = nn.Linear(64, 1, bias=False)
    engine = TorchDDP(
        module,
        world=world,
        param_groups=[{"params": [module.weight]}],
        optimizer_factory=partial(torch.optim.SGD, lr=0.5, fused=True),
        shard_optimizer=shard_optimizer,
        dtype=torch.bfloat16,
    )
    before = module.weight.detach().clone()
    with engine.microbatch(last=True):
        engine.backward(engine.model(torch.ones(1, 64, dtype=torch.bfloat16)).sum())
    engine.step()
    return "moved" if (module.weight != before).all() else "did not move"


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_a_fused_kernel_that_trains_nothing_is_refused_by_torchs_engines(ranks, shard_optimizer):
    """That of SGD in 16 bits, on CPUs where torch has it wrong."""
    try:
        (told,) = ranks(train_with_a_fused_kernel, shard_optimizer, world_size=1)
    except RankError as error:
        told = str(error)
    right = torch.optim.SGD, nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    assert told == "moved" if fused_is_right(*right) else "a fused kernel in this torch" in told


class KeepsNorm(torch.optim.SGD):
    """A number for each parameter, which is a sum over ranks under FSDP2."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["norm"] = parameter.grad.norm()
        super().step()


class KeepsRows(torch.optim.SGD):
    """Numbers for each row, which FSDP2 cuts: on one rank alone it may keep them."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim == 2:
                squares = parameter.grad.square().mean(1)
                self.state[parameter].setdefault("rows", squares.clone()).lerp_(squares, 0.1)
        super().step()


def state_of_parts(world: World, factory: Any) -> CanonicalState:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4))
    strategy = fsdp2(module, world, factory)
    for _ in range(2):
        strategy.zero_grad()
        with strategy.microbatch(last=True):
            strategy.backward(strategy.model(torch.eye(4)).square().sum() / world.size)
        strategy.step()
        strategy.load_state_dict(merge(gather_objects(pieces_of(strategy))))
    return pieces_of(strategy)


@pytest.mark.parametrize(
    "factory, world_size", [(KeepsNorm, 1), (KeepsNorm, 2), (KeepsNorm, 3), (KeepsRows, 1)]
)
def test_fsdp2_saves_the_whole_of_what_ranks_keep_in_parts(ranks, factory, world_size):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4))
    optimizer = factory(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(torch.eye(4)).square().sum().backward()
        optimizer.step()
    saved = assembled(ranks(state_of_parts, factory, world_size=world_size))
    for name, parameter in plain.named_parameters():
        for key, expected in optimizer.state[parameter].items():
            torch.testing.assert_close(saved[name][key], expected)


@crossed(
    "stage, precision",
    HSDP,
    ["fp32", "bf16_master"],
    quick=lambda stage, precision: (stage == "zero3") == (precision == "fp32"),
)
def test_fsdp2_in_two_groups_equals_one_process(ranks, stage, precision):
    """Also its state: each element is given once, by one of the groups."""
    check(ranks, HSDP[stage], Recipe(world_size=4, precision=precision))


def timeouts_of_groups(world: World) -> list[timedelta]:
    """Of the mesh itself: tensors of an equal one may show that of an engine before."""
    patient = replace(world, timeout_seconds=7200.0, lane="patient")  # no group of before
    mesh = torch_fsdp2._mesh(patient, 2)
    groups = (mesh.get_group(name) for name in ("replicate", "shard"))
    return [each._get_backend(world.device).options._timeout for each in groups]


def test_groups_of_fsdp2_are_as_patient_as_the_run(ranks):
    assert ranks(timeouts_of_groups, world_size=4) == [[timedelta(hours=2)] * 2] * 4


class Scaled(nn.LayerNorm):
    """A layer by its own weight, with another inside."""

    def __init__(self) -> None:
        super().__init__(4)
        self.inside = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inside(x) ** 2)


def step_of_nested_layers(world: World, unit: str) -> CanonicalState:
    module = nn.Sequential(Scaled(), nn.Linear(4, 1))
    strategy = fsdp2(module, world, unit=unit)
    with strategy.microbatch(last=True):
        strategy.backward(strategy.model(torch.eye(4)[world.rank :]).square().sum())
    strategy.step()
    return pieces_of(strategy)


def test_fsdp2_in_layers_that_lie_inside_of_others(ranks):
    layers, model = (assembled(ranks(step_of_nested_layers, unit)) for unit in ("layer", "model"))
    assert layers.keys() == model.keys()
    for name, tensors in model.items():
        assert torch.equal(layers[name]["weight"], tensors["weight"]), name


@pytest.mark.parametrize("model", ["moe_one_rank", "moe_by_turns"])
@pytest.mark.parametrize("stage", ["ddp", "zero1"])
def test_ddp_with_modules_skipped_on_some_ranks(ranks, stage, model):
    engine = NATIVE["ddp" if stage == "ddp" else "ddp_zero_redundancy"]
    check(ranks, engine, Recipe(model=model))


def test_ddp_names_a_parameter_without_gradient_before_it_steps_the_others(ranks):
    """Nobody said there may be some. torch says so in the next forward, when others have been stepped unreduced."""
    with pytest.raises(
        RankError, match=r"the first is \S+\), so that DDP did not .* model\.freeze="
    ):
        ranks(train_without_search)


def train_without_search(world: World) -> None:
    recipe = Recipe()
    module = MODELS["toy"].build().module
    config = recipe.optimizer_config()
    strategy = TorchDDP(
        module,
        param_groups=parameter_groups(module, config, []),
        optimizer_factory=optimizer_factory(config),
        world=world,
    )
    run_steps(strategy, world, recipe, range(2))


def with_transposed_weights(world: World) -> list[dict[str, dict[str, Tensor]]]:
    """Each engine's state behind a step, once it was loaded again."""
    states: list[dict[str, dict[str, Tensor]]] = []
    for engine in ("ddp", "zero1", "zero3"):
        module = nn.Linear(4, 2, bias=False)
        module.weight = nn.Parameter(torch.arange(8.0).view(4, 2).t())
        common: dict[str, Any] = {
            "param_groups": [{"params": [module.weight]}],
            "optimizer_factory": partial(torch.optim.AdamW, lr=0.1),
            "world": world,
        }
        strategy: Strategy = (
            TorchFSDP2(module, blocks=[], reshard_after_forward=True, **common)
            if engine == "zero3"
            else TorchDDP(module, shard_optimizer=engine == "zero1", **common)
        )
        with strategy.microbatch(last=True):
            strategy.backward(strategy.model(torch.ones(4)).sum())
        strategy.step()
        strategy.load_state_dict(merge([*gather_objects(strategy.state_dict())]))
        states.append(assembled([*gather_objects(pieces_of(strategy))]))
    return states


def test_weights_that_do_not_lie_row_by_row_are_trained_and_loaded(ranks):
    plain = torch.arange(8.0).view(4, 2).t().contiguous()
    optimizer = torch.optim.AdamW([plain], lr=0.1)
    plain.grad = torch.full_like(plain, 2.0)
    optimizer.step()
    for states in ranks(with_transposed_weights):
        for state in states:
            torch.testing.assert_close(state["weight"]["weight"], plain)
