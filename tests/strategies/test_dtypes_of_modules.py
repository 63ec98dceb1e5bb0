"""Norms compute in float32 inside of a model in 16 bits, as one process does whose norms cast by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.models_for_tests import MODELS, TestModel
from tests.oracle import (
    Recipe,
    Rules,
    _train_oracle,
    assembled,
    assert_same,
    build_on_rank,
    outcome_of,
    pieces_of,
    run_steps,
    train_on_ranks,
)
from tests.strategies.engine import Ours
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.canonical import merge
from zeroexp.interface.strategy import CanonicalState
from zeroexp.measure.memory import bytes_by_kind
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World, fake_world, gather_objects
from zeroexp.zero.casts import cast_at_borders
from zeroexp.zero.grouping import group_parameters
from zeroexp.zero.options import Dtypes, Options

NORMS = ("norm", *(f"blocks.{index}.norm" for index in range(3)))
OF_NORMS = tuple((name, torch.float32) for name in NORMS)
# stage, precision, options, ranks
CASES: list[tuple[str, str, dict[str, Any], int]] = [
    ("ddp", "bf16_master", {"layout": "tensor"}, 2),
    ("zero2", "bf16_master", {"transport": "native"}, 2),
    ("zero3", "bf16_master", {}, 2),
    ("zero3", "paper16", {"layout": "parameter", "unit": "model", "transport": "gloo"}, 3),
    ("zero3", "bf16_master", {"masters_rest": True, "secondary_partition": 2}, 4),
]
MORE: list[tuple[str, str, dict[str, Any], int]] = [
    ("zero1", "bf16_master", {"layout": "parameter"}, 3),
    ("zero2", "bf16_master", {"layout": "tensor", "offload": "optimizer"}, 2),
    ("zero3", "bf16_master", {}, 1),
    ("zero3", "bf16_master", {"layout": "tensor", "unit": "layer", "transport": "native"}, 2),
    ("zero3", "fp16_master", {"layout": "buffer", "unit": "module", "replicas": 2}, 4),
    ("zero3", "bf16_master", {"layout": "parameter", "offload": "all"}, 2),
]


class InFloat32(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).to(input.dtype)


class OneProcess:
    """The toy whose norms cast by themselves, and parameters of which theirs stay in float32."""

    def __init__(self) -> None:
        self._of_norms = set[nn.Parameter]()

    def build(self) -> BuiltModel:
        built = MODELS["toy"].build()
        for module in built.module.modules():
            if isinstance(module, nn.LayerNorm):
                module.__class__ = InFloat32
                self._of_norms.update(module.parameters())
        return built

    def publish(self, weights: Mapping[nn.Parameter, Tensor], dtype: torch.dtype) -> None:
        for parameter, weight in weights.items():
            own = torch.float32 if parameter in self._of_norms else dtype
            parameter.data = weight.detach().to(own, copy=True)


@pytest.mark.parametrize(
    "case",
    [*CASES[::2], *(pytest.param(case, marks=pytest.mark.slow) for case in (*CASES[1::2], *MORE))],
    ids=lambda case: "-".join(map(str, case)),
)
def test_norms_in_float32_train_as_in_one_process(ranks, case):
    """Weights and moments bit for bit."""
    stage, precision, options, world_size = case
    # Microbatches of a norm are added up in float32, and by the loop of one process in the dtype of the reduction.
    accumulation = 1 if precision == "paper16" else 2
    recipe = Recipe(precision=precision, world_size=world_size, accumulation=accumulation)
    make = Ours(stage, Options(**options), of_modules=OF_NORMS)
    answers = ranks(train_on_ranks, recipe, make, world_size=world_size)
    one, rules = OneProcess(), Rules(replicas=options.get("replicas", 1))
    expected = _train_oracle.__wrapped__(recipe, rules, TestModel(one.build), one.publish)
    assert_same(outcome_of(answers), expected)
    # In 16 bits the norms round other weights.
    rounded = _train_oracle.__wrapped__(recipe, rules, MODELS["toy"])
    assert rounded.losses != expected.losses


def gathered_by_a_step(world: World) -> tuple[list[tuple[torch.dtype, int]], dict[str, int]]:
    """Dtype and elements of each message that a step's gathers ask of the backend, and the bytes at rest."""
    options = Options(transport="native", keep="all")
    recipe = Recipe(precision="bf16_master", accumulation=1)
    strategy: Any = build_on_rank(world, recipe, Ours("zero3", options, of_modules=OF_NORMS))
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    asked, original = list[tuple[torch.dtype, int]](), getattr(dist, name)

    def intercepted(full: Tensor, piece: Tensor, **words: Any) -> Any:
        asked.append((full.dtype, full.numel()))
        return original(full, piece, **words)

    setattr(dist, name, intercepted)
    try:
        run_steps(strategy, world, recipe, range(1))
    finally:
        setattr(dist, name, original)
    return asked, bytes_by_kind(strategy.model_states())


def test_what_a_norm_computes_with_travels_and_rests_in_float32(ranks):
    """A norm has ten elements, five on each of two ranks; they rest as their masters."""
    named = dict(MODELS["toy"].build().module.named_parameters())
    others = [p for name, p in named.items() if name.rpartition(".")[0] not in NORMS]
    for asked, held in ranks(gathered_by_a_step):
        wide = [numel for dtype, numel in asked if dtype is torch.float32]
        assert wide == [10] * len(NORMS)
        assert all(dtype is torch.bfloat16 for dtype, numel in asked if numel != 10)
        padded = held["parameters"] - 4 * 5 * len(NORMS)
        assert 0 <= padded - sum(p.numel() for p in others) <= 2 * len(asked)
        trained = sum(p.numel() for p in others if p.requires_grad)
        assert abs(held["master"] - 4 * trained / 2) <= 4 * len(asked)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        self.norms = nn.Sequential(*(nn.LayerNorm(6) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x))
        return x.float()


def beside_fsdp2(world: World) -> tuple[list[float], list[float]]:
    """Losses of six steps, ours and FSDP2's with a policy for each norm."""
    full, half = torch.float32, torch.bfloat16
    inputs = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(world.rank)).to(half)
    torch.manual_seed(0)
    ours, torchs = Model(), Model()
    torchs.load_state_dict(ours.state_dict())
    blocks = [f"blocks.{index}" for index in range(3)]
    strategy = Sharded(
        ours,
        blocks=blocks,
        stage=STAGES["zero3"],
        param_groups=[{"params": ours.parameters()}],
        optimizer_factory=lambda groups: torch.optim.AdamW(groups, lr=0.1),
        world=world,
        dtypes=Dtypes(half, full, full, of_modules={f"norms.{i}": full for i in range(3)}),
    )
    policy = MixedPrecisionPolicy(half, full)
    for norm in torchs.norms:
        fully_shard(norm, mp_policy=MixedPrecisionPolicy(full, full, output_dtype=half))
    for block in torchs.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(torchs, mp_policy=policy)
    optimizer = torch.optim.AdamW(torchs.parameters(), lr=0.1)
    found: tuple[list[float], list[float]] = ([], [])
    for step in range(6):
        with strategy.microbatch(last=True):
            loss = ours(inputs[step]).square().mean()
            strategy.backward(loss / world.size)
        strategy.step()
        strategy.zero_grad()
        found[0].append(loss.item())
        loss = torchs(inputs[step]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[1].append(loss.item())
    return found


def test_losses_are_those_of_fsdp2_with_a_policy_for_each_norm(ranks):
    for ours, torchs in ranks(beside_fsdp2):
        assert ours == torchs
        assert ours[-1] < ours[0]


def shown_at_first(world: World, stage: str) -> tuple[dict[str, Tensor], CanonicalState]:
    """What the model shows before its first step and after its state is loaded again, and the state."""
    full, half = torch.float32, torch.bfloat16
    torch.manual_seed(0)
    model = Model()
    for norm in model.norms:
        nn.init.uniform_(norm.weight)
    strategy = Sharded(
        model,
        blocks=[f"blocks.{index}" for index in range(3)],
        stage=STAGES[stage],
        param_groups=[{"params": model.parameters()}],
        optimizer_factory=lambda groups: torch.optim.AdamW(groups, lr=0.1),
        world=world,
        dtypes=Dtypes(half, half, half, of_modules={f"norms.{i}": full for i in range(3)}),
    )
    shown: list[dict[str, Tensor]] = []
    for _ in range(2):
        with strategy.gathered():
            shown.append({name: p.detach().clone() for name, p in model.named_parameters()})
        state = pieces_of(strategy)
        strategy.load_state_dict(merge(gather_objects(state)))
    assert all(map(torch.equal, shown[0].values(), shown[1].values()))
    return shown[0], state


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero3"])
def test_a_model_shows_at_first_what_masters_of_fewer_bits_hold(ranks, stage, world_size):
    """As after each step; else a state before the first one would be of other weights than those that train."""
    shown, states = zip(*ranks(shown_at_first, stage, world_size=world_size), strict=True)
    saved = assembled(states)
    for each in shown:
        for name, parameter in each.items():
            assert torch.equal(saved[name]["weight"].float(), parameter.float()), name
            wide = torch.float32 if name.startswith("norms") else torch.bfloat16
            assert parameter.dtype is wide


def test_a_module_inside_returns_the_dtype_of_the_module_around_it():
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.Linear(4, 4))
    seen: list[torch.dtype] = []
    inner = {"0": torch.float64, "0.0": torch.float32}
    dtypes = Dtypes(torch.bfloat16, torch.float32, torch.float32, of_modules=inner)
    cast_at_borders(model, dtypes)
    for module in (model[0][0], model[0][1], model[1]):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        module.to(dtypes.compute)
    model[0][0].to(torch.float32)
    model[0][1].to(torch.float64)
    model(torch.ones(2, 4, dtype=torch.bfloat16))
    assert seen == [torch.float32, torch.float64, torch.bfloat16]


def test_what_a_module_is_given_by_name_is_cast_too():
    model = nn.Sequential(nn.LayerNorm(4))
    dtypes = Dtypes(torch.bfloat16, torch.float32, torch.float32, of_modules={"0": torch.float32})
    cast_at_borders(model, dtypes)
    seen: list[torch.dtype] = []
    model[0].register_forward_pre_hook(
        lambda _module, _args, words: seen.append(words["input"].dtype), with_kwargs=True
    )
    assert model[0](input=torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert seen == [torch.float32]


def test_integers_and_other_things_cross_a_border_as_they_are():
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    dtypes = Dtypes(torch.bfloat16, torch.float32, torch.float32, of_modules={"0": torch.float32})
    cast_at_borders(model, dtypes)
    model[0].register_forward_pre_hook(lambda _, args: args[:1])
    model[1].to(dtypes.compute)
    assert model[1](model[0](torch.tensor([1, 2]), None, "word")).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("of_modules", "named"),
    [
        ({"nothing": torch.float32}, "'nothing' is no module of the model"),
        ({"blocks": torch.float32}, "'blocks' is no module of the model, is a list, or holds"),
        ({"": torch.float32}, "name modules inside"),
        ({"head": torch.float32}, "belongs to the model and to head"),
    ],
)
def test_modules_without_parameters_of_their_own_are_refused(of_modules, named):
    built, recipe = MODELS["toy"].build(), Recipe(precision="bf16_master")
    with fake_world(0, 2) as world, pytest.raises(ValueError, match=named):
        Ours("zero3", Options(), of_modules=tuple(of_modules.items()))(built, recipe, world)


def test_a_list_whose_forward_nobody_calls_is_refused():
    with pytest.raises(ValueError, match="'blocks' is no module of the model, is a list"):
        group_parameters(MODELS["toy"].build().module, [], "block", apart=["blocks"])
