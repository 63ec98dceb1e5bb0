"""float16 with a loss scale: the weights, scales and left-out steps of one process with torch.amp.GradScaler."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.composing import composed
from tests.ranks import RankError
from zeroexp.check import check
from zeroexp.check.rules_strategy import check_float16
from zeroexp.config.keys import resolve
from zeroexp.cut.stage import STAGES
from zeroexp.engines.build import build_strategy
from zeroexp.engines.sharded import Sharded
from zeroexp.engines.torch_fsdp2 import TorchFSDP2
from zeroexp.interface import loss_scale
from zeroexp.interface.canonical import merge
from zeroexp.interface.loss_scale import SCALE, LossScale
from zeroexp.interface.strategy import Strategy
from zeroexp.measure.record import StepRecord
from zeroexp.measure.summary import diverged_at
from zeroexp.models.module import build_model
from zeroexp.process.world import World, fake_world, gather_objects
from zeroexp.zero.options import Dtypes, Options

DTYPES = Dtypes(torch.float16, torch.float32, torch.float32)
WORLD_SIZE, STEPS, GROWS_AFTER = 2, 14, 3
# One rank's gradients overflow at 65536 times the loss, and at a few scales below.
LARGEST = {0: 1.0, 1: 40.0}
CLIP = 1e9  # which is never reached
LAYOUTS = ["buffer", "tensor", "parameter"]
QUICK = [*zip(STAGES, LAYOUTS * 2, strict=False)]
CASES = [
    *(
        pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow)
        for each in product(STAGES, LAYOUTS)
    ),
    ("zero2", "fsdp2"),
    ("zero3", "fsdp2"),
]


@dataclass
class Seen:
    scales: list[float] = field(default_factory=list)  # of each step
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    inputs = torch.randn(4, 6, generator=torch.manual_seed(10 * step + rank))
    return (model(inputs.half()).float() * LARGEST[rank]).sum()


def make_optimizer(groups: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, foreach=True)


def test_the_scale_is_that_of_torch() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert scaler.get_growth_interval() == loss_scale.GROWS_AFTER
    assert scaler.get_scale() == loss_scale.FIRST_SCALE


def test_it_grows_and_falls_as_torchs_where_overflows_come_amid_a_count(monkeypatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", GROWS_AFTER)
    ours = LossScale(torch.optim.SGD([torch.ones(1)]), is_used=True)
    scaler = torch.amp.GradScaler("cpu", growth_interval=GROWS_AFTER)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    for overflows in map(int, "0010000001100000000"):
        weight.grad = torch.full((1,), torch.inf if overflows else 1.0)
        scaler.scale(torch.ones(1))  # makes its tensors
        scaler.step(optimizer)
        scaler.update()
        assert ours.allows(weight.grad.norm) is not bool(overflows)
        assert ours._now()[0] == scaler.get_scale()


def with_grad_scaler() -> Seen:
    """One process that trains on both ranks' samples."""
    model, seen = make_model().half(), Seen()
    masters = [parameter.detach().float() for parameter in make_model().parameters()]
    optimizer = make_optimizer(masters)
    scaler = torch.amp.GradScaler("cpu", growth_interval=GROWS_AFTER)
    for step in range(STEPS):
        sums = [torch.zeros_like(master) for master in masters]
        for rank in range(WORLD_SIZE):
            scaler.scale(loss_of(model, step, rank)).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad.float()
                parameter.grad = None
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        seen.scales.append(scaler.get_scale())
        scaler.unscale_(optimizer)
        seen.norms.append(nn.utils.clip_grad_norm_(masters, CLIP).item())
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_([p.detach() for p in model.parameters()], masters)
    names = [name for name, _ in model.named_parameters()]
    seen.weights = dict(zip(names, masters, strict=True))
    return seen


def build(world: World, stage: str, layout: str) -> Strategy:
    model = make_model()
    common = {
        "blocks": ["0", "2"],
        "param_groups": [{"params": list(model.parameters())}],
        "optimizer_factory": make_optimizer,
        "world": world,
        "dtypes": DTYPES,
        "max_grad_norm": CLIP,
        "scales_loss": True,
    }
    if layout == "fsdp2":
        return TorchFSDP2(model, reshard_after_forward=stage == "zero3", **common)
    return Sharded(model, stage=STAGES[stage], options=Options(layout=layout), **common)


def train(world: World, stage: str, layout: str, resumes_at: int = STEPS) -> Seen:
    seen, strategy = Seen(), build(world, stage, layout)
    with mock.patch.object(loss_scale, "GROWS_AFTER", GROWS_AFTER):
        for step in range(STEPS):
            if step == resumes_at:
                before, strategy = strategy, build(world, stage, layout)
                strategy.load_state_dict(merge(gather_objects(before.state_dict())))
            seen.scales.append(strategy.optimizer.param_groups[0][SCALE])
            with strategy.microbatch(last=True):
                strategy.backward(loss_of(strategy.model, step, world.rank))
            seen.norms.append(strategy.step().item())
            strategy.zero_grad()
    for name, entry in strategy.state_dict().items():
        for piece in entry["weight"].pieces:
            whole = seen.weights.setdefault(name, torch.full((entry["weight"].shape), torch.nan))
            whole.view(-1)[piece.start : piece.start + piece.tensor.numel()] = piece.tensor
    return seen


@pytest.mark.parametrize(("stage", "layout"), CASES)
def test_two_ranks_scale_and_leave_out_steps_as_one_process_with_a_grad_scaler(
    ranks, stage, layout
):
    expected, of_ranks = with_grad_scaler(), ranks(train, stage, layout)
    left_out = [not torch.tensor(norm).isfinite() for norm in expected.norms]
    assert 2 < sum(left_out) < STEPS - 4 and max(expected.scales[6:]) > min(expected.scales)
    for seen in of_ranks:
        assert seen.scales == expected.scales
        assert [not torch.tensor(norm).isfinite() for norm in seen.norms] == left_out
        norms = [n for n, out in zip(seen.norms, left_out, strict=True) if not out]
        assert norms == pytest.approx([n for n in expected.norms if n < CLIP], rel=1e-5)
        for name, weight in seen.weights.items():
            held = ~weight.isnan()
            assert torch.equal(weight[held], expected.weights[name][held]), name


@pytest.mark.parametrize("layout", ["buffer", "fsdp2"])
def test_a_state_holds_the_scale_and_how_long_it_has_been_right(ranks, layout):
    for whole, resumed in zip(
        ranks(train, "zero3", layout), ranks(train, "zero3", layout, STEPS - 2), strict=True
    ):
        assert resumed.scales == whole.scales and resumed.norms[-2:] == whole.norms[-2:]


def backward_past_the_engine(world: World) -> None:
    strategy = build(world, "zero2", "buffer")
    with strategy.microbatch(last=True):
        loss_of(strategy.model, 0, world.rank).backward()


def test_a_backward_that_nothing_scales_is_refused(ranks):
    with pytest.raises(RankError, match=r"call strategy\.backward\(loss\), not loss\.backward"):
        ranks(backward_past_the_engine)


def test_a_step_that_was_left_out_is_no_divergence():
    def record(norm: float, scale: float | None) -> StepRecord:
        step = mock.Mock(spec=StepRecord, step=1, loss=1.0, grad_norm=norm, loss_scale=scale)
        return step

    assert diverged_at([record(float("inf"), 65536.0)]) is None
    assert diverged_at([record(float("inf"), None)]) == 1


def test_a_loss_that_is_finite_at_no_scale_ends_the_run():
    scale = LossScale(make_optimizer([torch.ones(1)]), is_used=True)
    with pytest.raises(ValueError, match=r"not finite even at a loss scale of 6e-08; use bfloat16"):
        for _ in range(2000):
            scale.divide([torch.ones(1)])
            scale.allows(lambda: torch.tensor(float("nan")))


def test_an_engine_that_scales_no_loss_is_refused():
    config = composed("precision=fp16_master", "strategy.implementation=deepspeed")
    assert [problem for _, problem, _ in check_float16(config)] == [
        "only ours and FSDP2 scale the loss"
    ]


@pytest.mark.parametrize("rests", ["master", "int8", "null"])
def test_float16_scales_the_loss_whatever_rests(rests):
    words = "model=tiny strategy=zero3 precision=fp16_master world_size=2 data=synthetic"
    dtype = "" if rests == "null" else f" strategy.parameters.dtype={rests}"
    config = resolve(composed(*f"{words}{dtype}".split()))
    check(config)
    model = build_model(config.model, seed=0, vocab_size=512)
    with fake_world(0, 2) as world:
        strategy = build_strategy(config, model, world)
    assert strategy.optimizer.param_groups[0][SCALE] == loss_scale.FIRST_SCALE
