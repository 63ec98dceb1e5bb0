"""Moments in bfloat16: torch's step between two roundings, planned to the byte, and changed by a load.

That any cut rounds what one process rounds is shown by pairs of settings in test_parity.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.composing import composed
from tests.engines import NATIVE
from tests.oracle import (
    Recipe,
    assert_same,
    build_on_rank,
    configured,
    outcome_of,
    pieces_of,
    run_steps,
    train_on_ranks,
    train_oracle,
    train_two_steps,
)
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.engines.build import build_strategy
from zeroexp.interface.canonical import merge
from zeroexp.interface.strategy import CanonicalState
from zeroexp.measure.memory import bytes_by_kind
from zeroexp.models.module import build_model
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.process.world import World, fake_world
from zeroexp.training import rounded_moments

# Fused is what a run asks for; rounded moments do without.
RECIPE = Recipe(moments="bfloat16", fused=True)
KEPT = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("batch_numel", [1, 30, 1 << 20])
def test_it_is_torchs_step_between_two_roundings(monkeypatch, batch_numel) -> None:
    """Whatever is stepped at once. A parameter without a gradient keeps its moments."""
    monkeypatch.setattr(rounded_moments, "BATCH_NUMEL", batch_numel)
    config = RECIPE.optimizer_config()
    shapes = [(5, 7), (3,), (), (40,)]
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (
        [nn.Parameter(torch.linspace(-1, 1, torch.Size(s).numel()).view(s)) for s in shapes]
        for _ in range(2)
    )
    groups = [{"params": ours[:2], "weight_decay": 0.1}, {"params": ours[2:], "weight_decay": 0.0}]
    one = optimizer_factory(config)(groups)
    same = [{**groups[0], "params": theirs[:2]}, {**groups[1], "params": theirs[2:]}]
    two = optimizer_factory(replace(config, moments=None))(same)
    for step in range(300):  # a number of steps above 256 is none of bfloat16's
        for index, (parameter, other) in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(parameter.shape, generator=generator)
            skipped = index == 3 and step % 2
            parameter.grad = None if skipped else gradient
            other.grad = None if skipped else gradient.clone()
        one.step()
        two.step()
        for own in two.state.values():
            own.update({key: own[key].bfloat16().float() for key in KEPT})
    for parameter, other in zip(ours, theirs, strict=True):
        assert torch.equal(parameter, other)
        own, expected = one.state[parameter], two.state[other]
        assert own["step"] == expected["step"] == (150 if parameter is ours[3] else 300)
        for key in KEPT:
            assert own[key].dtype == torch.bfloat16
            assert torch.equal(own[key].float(), expected[key])
    assert [len(group["params"]) for group in one.param_groups] == [2, 2]


@pytest.mark.parametrize("name", NATIVE)
def test_engines_of_torch(ranks, name) -> None:
    answers = ranks(train_on_ranks, RECIPE, NATIVE[name].make)
    assert_same(outcome_of(answers), train_oracle(RECIPE, NATIVE[name].rules))


# ---- checkpoints


def go_on(world: World, recipe: Recipe, make: Any, state: CanonicalState) -> Any:
    """What is there after the load, and that a step follows."""
    strategy = build_on_rank(world, recipe, make)
    strategy.load_state_dict(state)
    loaded = pieces_of(strategy)
    run_steps(strategy, world, recipe, range(2, 3))
    return loaded, pieces_of(strategy)


@pytest.mark.parametrize("moments", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("first", "last"),
    [
        (("zero1", "buffer"), ("zero3", "parameter")),
        (("zero3", "tensor"), ("zero1", "torch")),
        (("zero3", "torch"), ("zero2", "buffer")),
    ],
)
def test_a_load_gives_moments_the_dtype_of_who_goes_on(ranks, moments, first, last) -> None:
    """Of a run in float32 they are rounded once; of one in bfloat16 they are what they were."""
    other = "bfloat16" if moments is None else None
    saved = merge(ranks(train_two_steps, replace(RECIPE, moments=moments), configured(*first)))
    answers = ranks(go_on, replace(RECIPE, moments=other), configured(*last), saved)
    loaded, stepped = (merge(states) for states in zip(*answers, strict=True))
    dtype = getattr(torch, other or "float32")
    for name, entry in saved.items():
        for key in [key for key in KEPT if key in entry]:
            assert loaded[name][key].dtype == stepped[name][key].dtype == dtype
            expected = whole(entry[key]).to(dtype)
            assert torch.equal(whole(loaded[name][key]), expected), f"{name}.{key}"


def whole(canonical: Any) -> torch.Tensor:
    pieces = sorted(canonical.pieces, key=lambda piece: piece.start)
    return torch.cat([piece.tensor for piece in pieces])


# ---- plans


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stage", ["ddp", "zero2", "zero3"])
def test_a_plan_is_what_the_engine_holds(stage, optimizer) -> None:
    words = (f"strategy={stage}", f"optimizer={optimizer}", "strategy.implementation=parameter")
    more = ("world_size=3", "data.global_batch_size=3", "optimizer.moments=bfloat16")
    config = composed("model=tiny", *words, *more)
    form = form_of(config, build_on_meta(config), "native")
    plain = form_of(
        replace(config, optimizer=replace(config.optimizer, moments=None)),
        build_on_meta(config),
        "native",
    )
    for rank in range(3):
        with fake_world(rank, 3) as world:
            strategy = build_strategy(config, build_model(config.model, seed=1), world)
            with strategy.microbatch(last=True):
                tokens = torch.zeros(1, 4, dtype=torch.long)
                strategy.backward(strategy.model(input_ids=tokens).logits.float().sum())
            strategy.step(drain=True)
            held = form.held_bytes("after_step", rank)
            assert bytes_by_kind(strategy.model_states()) == held
        wide = plain.held_bytes("after_step", rank)
        assert held["optimizer"] < 0.51 * wide["optimizer"]
        assert {**held, "optimizer": 0} == {**wide, "optimizer": 0}
