"""Moments in bfloat16 and in 8 bits: torch's step between two roundings, planned to the byte, and changed by a load.

That any cut rounds what one process rounds is shown by pairs of settings in test_parity.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.composing import composed
from tests.crossed import crossed
from tests.engines import NATIVE
from tests.oracle import (
    Outcome,
    Recipe,
    assembled,
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
from tests.plan.real_steps import assert_as_planned
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.cut.moment_blocks import BLOCK, MOST_DECAY, ROW_BYTES
from zeroexp.interface import quantized_moments
from zeroexp.interface.canonical import merge
from zeroexp.interface.quantized_moments import at_rest, decode, encode, to_step
from zeroexp.interface.strategy import CanonicalState
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.process.world import World
from zeroexp.training import rounded_moments

# Fused is what a run asks for; rounded moments do without.
RECIPE = Recipe(moments="bfloat16", fused=True)
IN_BLOCKS = Recipe(moments="int8", fused=True, model="large")
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


# ---- 8 bits


def blocks_of(values: torch.Tensor) -> torch.Tensor:
    return decode(encode(values))[: values.numel()]


@pytest.mark.parametrize("scale", [1e-41, 1e-20, 1.0, 1e20])
@pytest.mark.parametrize("power", [1, 2])
def test_a_code_is_near_and_coding_again_changes_nothing(scale, power) -> None:
    """A step is 2 ** (1 / 8), so that half of it is 4.4 % of the value. 3,000 elements: the last block is not full."""
    flat = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    flat = (flat * torch.logspace(-3, 0, 3000)) ** power * scale
    flat[512:800] = 0
    once = blocks_of(flat)
    assert torch.equal(blocks_of(once), once)
    assert torch.equal(once == 0, flat == 0)
    if scale > 1e-30:  # a denormal has few digits itself
        assert bool(((once - flat).abs() <= 0.0434 * flat.abs()).all())
    largest = flat.abs().split(BLOCK)
    assert [part.abs().max() for part in once.split(BLOCK)] == [part.max() for part in largest]


@pytest.mark.parametrize("word", MOST_DECAY)
def test_squares_of_small_gradients_stay_above_zero(word) -> None:
    """A step divides by their root: float16, which has nothing between 0 and 6e-8, would train to another loss."""
    squares = (1e-7 * (0.5 + torch.rand(2 * BLOCK))).square()
    kept = to_step(at_rest(squares, getattr(torch, word)), squares)
    torch.testing.assert_close(kept, squares, rtol=0.05, atol=0)


def test_what_is_too_small_for_a_code_divides_nothing() -> None:
    """Of squares it stays above 0, since a step divides by it; of a momentum it is 0, or it would never end."""
    squares = torch.tensor([1.0, 1e-12, 0.0])
    assert blocks_of(squares).tolist() == [1.0, pytest.approx(2 ** (-254 / 8)), 0.0]
    momentum = torch.tensor([-1.0, 1e-6, 2 ** (-126 / 8)])
    assert blocks_of(momentum).tolist() == [-1.0, 0.0, momentum[2]]
    falling = momentum
    for _ in range(200):
        falling = blocks_of(torch.cat([momentum[:1], 0.9 * falling[1:]]))
    assert falling.tolist() == [-1.0, 0.0, 0.0]


def test_tables_of_codes_are_brought_to_a_device_once(monkeypatch) -> None:
    """That stops a GPU. Each mode of fake tensors has its own; of fewer blocks at once the codes are the same."""
    monkeypatch.setattr(quantized_moments, "KEPT_ON", ("cpu",))
    quantized_moments._tables.cache_clear()
    flat = torch.linspace(-1, 1, 3000)
    for _ in range(2):
        with FakeTensorMode():
            assert blocks_of(torch.ones(3000)).shape == flat.shape
    once = blocks_of(flat)
    monkeypatch.setattr(torch, "tensor", None)
    monkeypatch.setattr(quantized_moments, "BLOCKS_AT_ONCE", 1)
    assert torch.equal(blocks_of(flat), once)
    quantized_moments._tables.cache_clear()


@pytest.mark.parametrize("name", ["ddp", "ddp_zero_redundancy"])
def test_engines_of_torch_that_keep_parameters_whole(ranks, name) -> None:
    answers = ranks(train_on_ranks, IN_BLOCKS, NATIVE[name].make)
    assert_same(outcome_of(answers), train_oracle(IN_BLOCKS, NATIVE[name].rules))


def test_muon_keeps_its_momentum_in_blocks(ranks) -> None:
    """As one process does, bit for bit; where a matrix lies in memory decides the last digits of a product with it."""
    recipe = replace(IN_BLOCKS, optimizer="muon", world_size=3, steps=1)
    answers = ranks(train_on_ranks, recipe, configured("zero1", "buffer"), world_size=3)
    ours, oracle = outcome_of(answers).state, train_oracle(recipe).state
    assert ours["blocks.1.up.weight"]["momentum_buffer"].dtype == torch.int8
    for name, expected in oracle.items():
        assert ours[name].keys() == expected.keys()
        torch.testing.assert_close(ours[name].pop("weight"), expected["weight"], atol=2e-4, rtol=0)
        assert all(torch.equal(moment, expected[key]) for key, moment in ours[name].items())


# ---- checkpoints


def go_on(world: World, recipe: Recipe, make: Any, state: CanonicalState) -> Any:
    """What is there after the load, and that a step follows."""
    strategy = build_on_rank(world, recipe, make)
    strategy.load_state_dict(state)
    loaded = pieces_of(strategy)
    run_steps(strategy, world, recipe, range(2, 3))
    return loaded, pieces_of(strategy)


@pytest.mark.parametrize(
    ("moments", "first", "last"),
    [
        (None, ("zero1", "buffer"), ("zero3", "parameter")),
        pytest.param("bfloat16", ("zero3", "tensor"), ("zero1", "torch"), marks=pytest.mark.slow),
        pytest.param(None, ("zero3", "torch"), ("zero2", "buffer"), marks=pytest.mark.slow),
        ("bfloat16", ("zero3", "torch"), ("zero2", "buffer")),
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


@pytest.mark.parametrize(
    ("first", "size", "last"),
    [
        pytest.param(("zero3", "tensor"), 4, ("zero1", "torch"), marks=pytest.mark.slow),
        (("ddp", "buffer"), 1, ("zero3", "buffer")),
        (("zero1", "torch"), 2, ("zero1", "tensor")),
    ],
)
def test_blocks_go_on_on_other_ranks(ranks, first, size, last) -> None:
    """They are those that were saved, and where the batches are too, the third step is that of one process."""
    recipe = replace(IN_BLOCKS, world_size=size)
    states = ranks(train_two_steps, recipe, configured(*first), world_size=size)
    saved = merge(states)
    answers = ranks(go_on, IN_BLOCKS, configured(*last), saved)
    loaded, stepped = (merge(of_rank) for of_rank in zip(*answers, strict=True))
    for name in saved:
        dtype = torch.int8 if prod(saved[name]["weight"].shape) >= 4096 else torch.float32
        for key in [key for key in KEPT if key in saved[name]]:
            assert torch.equal(whole(loaded[name][key]), whole(saved[name][key])), f"{name}.{key}"
            assert loaded[name][key].dtype == saved[name][key].dtype == dtype
    if size == IN_BLOCKS.world_size:
        oracle = train_oracle(IN_BLOCKS).state
        assert_same(Outcome(state=assembled([stepped])), Outcome(state=oracle))


@crossed(
    "other, is_saved_so",
    [None, "bfloat16"],
    [True, False],
    quick=lambda other, is_saved_so: is_saved_so == (other is None),
)
def test_a_load_leaves_and_enters_blocks(ranks, other, is_saved_so) -> None:
    recipes = IN_BLOCKS, replace(IN_BLOCKS, moments=other)
    first, last = recipes if is_saved_so else recipes[::-1]
    saved = merge(ranks(train_two_steps, first, configured("zero2", "tensor")))
    answers = ranks(go_on, last, configured("zero3", "buffer"), saved)
    loaded = merge([state for state, _ in answers])
    dtype = getattr(torch, other or "float32")
    for key in KEPT:
        before, after = (whole(state["embedding.weight"][key]) for state in (saved, loaded))
        rows = (before if is_saved_so else after).view(-1, ROW_BYTES)
        if is_saved_so:
            assert torch.equal(after, decode(rows)[: after.numel()].to(dtype))
        else:
            assert torch.equal(rows, encode(before))


def whole(canonical: Any) -> torch.Tensor:
    pieces = sorted(canonical.pieces, key=lambda piece: piece.start)
    return torch.cat([piece.tensor for piece in pieces])


# ---- plans


# Of the bytes in float32; 8,512 of the 223,552 parameters of model=tiny are of small tensors, as of 32 x 64.
SHARE = {"bfloat16": 0.51, "int8": 0.35}


@pytest.mark.parametrize(
    ("stage", "layout", "moments", "optimizer"),
    [
        ("ddp", "parameter", "int8", "muon"),
        *(("zero2", "parameter", *each) for each in zip(SHARE, ("muon", "adamw"), strict=True)),
        ("zero3", "tensor", "int8", "adamw"),
        ("zero3", "buffer", "int8", "muon"),
    ],
)
def test_a_plan_is_what_the_engine_holds_and_sends(stage, layout, moments, optimizer) -> None:
    words = (f"strategy={stage}", f"optimizer={optimizer}", f"strategy.implementation={layout}")
    more = ("world_size=3", "data.global_batch_size=3", f"optimizer.moments={moments}")
    config = composed("model=tiny", *words, *more)
    form = assert_as_planned(config)
    plain = replace(config, optimizer=replace(config.optimizer, moments=None))
    wider = form_of(plain, build_on_meta(plain), "native")
    for rank in range(3):
        held, wide = (each.held_bytes("after_step", rank) for each in (form, wider))
        assert held["optimizer"] < SHARE[moments] * wide["optimizer"]
        if layout == "parameter":  # others cut elsewhere, between blocks
            assert {**held, "optimizer": 0} == {**wide, "optimizer": 0}
