"""Masters rest instead of parameters: gathers cast them, as one process does after each update, or send their codes.

With codes one process rounds its weights by the codec before each step, and updates masters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.comm.test_codec import round_trip
from tests.comm.test_issued import a_step, engine_of_nine_units
from tests.crossed import every_nth
from tests.models_for_tests import MODELS
from tests.oracle import (
    Recipe,
    Rules,
    _train_oracle,
    assert_same,
    build_on_rank,
    outcome_of,
    pieces_of,
    run_steps,
)
from tests.strategies.engine import Ours
from tests.strategies.test_offload import written
from zeroexp.comm import codec as codecs
from zeroexp.cut.chunk import Chunk
from zeroexp.cut.codec_bytes import encoded_bytes
from zeroexp.interface.canonical import merge
from zeroexp.measure.memory import bytes_by_kind
from zeroexp.process import world as worlds
from zeroexp.process.world import World, fake_world
from zeroexp.zero.options import Dtypes, Options, OuterOptimizer

FLOAT8 = Options(gather_codec="float8", masters_rest=True)
# layout, codec, precision, other options, ranks
CASES: list[tuple[str, str | None, str, dict[str, Any], int]] = [
    ("buffer", None, "bf16_master", {}, 2),
    ("tensor", None, "bf16_master", {"transport": "native", "unit": "layer"}, 3),
    ("parameter", None, "fp16_master", {"secondary_partition": 2}, 4),
    ("buffer", None, "paper16", {"replicas": 2, "transport": "native"}, 4),
    ("buffer", "float8", "bf16_master", {}, 2),
    ("buffer", "float8", "fp32", {"transport": "native", "unit": "module"}, 2),
    ("tensor", "int8", "bf16_master", {"keep": "none", "prefetch": 2}, 3),
    ("parameter", "float8", "paper16", {"overlap": False}, 3),
    ("parameter", "int4", "fp16_master", {"offload": "optimizer"}, 2),
    ("buffer", "float8", "bf16_master", {"secondary_partition": 2}, 4),
    ("tensor", "float8", "bf16_master", {"replicas": 2, "offload": "optimizer"}, 4),
    ("parameter", "float8", "fp32", {"secondary_partition": 2, "offload": "optimizer"}, 4),
]


class RoundedByHand:
    """Parameters are what the codes of the ranks' sections of each unit stand for; what is frozen is in their dtype."""

    def __init__(self, recipe: Recipe, codec: str, units: Sequence[Sequence[Chunk]]):
        named = MODELS[recipe.model].build().module.named_parameters()
        names = [(name, parameter.requires_grad) for name, parameter in named]
        self._names = sorted(names, key=lambda each: not each[1])  # as the oracle has them
        self._codec, self._units = codec, units
        self._weights: dict[str, Tensor] = {}
        self._parameters: dict[str, nn.Parameter] = {}

    def __call__(self, weights: Mapping[nn.Parameter, Tensor], dtype: torch.dtype) -> None:
        if not self._parameters:
            self._parameters = {name: p for (name, _), p in zip(self._names, weights, strict=True)}
        for name, parameter in self._parameters.items():
            if parameter in weights:
                weight = weights[parameter].detach()
                self._weights[name] = weight if parameter.requires_grad else weight.to(dtype)
        for chunks in self._units:
            fulls = [self._full(chunk) for chunk in chunks]
            for rank in range(len(chunks[0].cuts) - 1):
                pairs = zip(chunks, fulls, strict=True)
                sections = [full[chunk.section(rank)] for chunk, full in pairs]
                rounded = round_trip(self._codec, torch.cat(sections)).split([*map(len, sections)])
                torch._foreach_copy_(sections, list(rounded))
            for chunk, full in zip(chunks, fulls, strict=True):
                for member in chunk.members:
                    parameter = self._parameters[member.name]
                    shown = full[member.start : member.stop].view(parameter.shape)
                    parameter.data = shown.to(dtype, copy=True)

    def _full(self, chunk: Chunk) -> Tensor:
        full = torch.zeros(chunk.padded_numel)
        for member in chunk.members:
            full[member.start : member.stop] = self._weights[member.name].flatten()
        return full


def train(world: World, recipe: Recipe, options: Options):
    strategy: Any = build_on_rank(world, recipe, Ours("zero3", options))
    outcome = run_steps(strategy, world, recipe, range(recipe.steps))
    units = [[held.chunk for held in unit.held] for unit in strategy.units]
    return outcome, pieces_of(strategy), units


@every_nth(2, "case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_what_is_computed_with_is_what_one_process_rounds(ranks, case):
    """Masters and moments bit for bit, as those of a loop of plain tensors."""
    layout, codec, precision, more, world_size = case
    recipe = Recipe(precision=precision, world_size=world_size, steps=2)
    options = replace(FLOAT8, layout=layout, gather_codec=codec, **more)
    answers = ranks(train, recipe, options, world_size=world_size)
    rules = Rules(replicas=options.replicas)
    publish = codec and RoundedByHand(recipe, codec, answers[0][2])
    expected = _train_oracle.__wrapped__(recipe, rules, MODELS[recipe.model], publish)
    assert_same(outcome_of([answer[:2] for answer in answers]), expected)


def train_with_and_without(world: World, options: Options):
    """In fp32 gathers encode the masters too."""
    recipe = Recipe(world_size=world.size, steps=4)
    both = (options, replace(options, masters_rest=False))
    return [train(world, recipe, each)[:2] for each in both]


@pytest.mark.parametrize(
    ("more", "world_size"),
    [
        pytest.param({"layout": "tensor", "keep": "all"}, 3, marks=pytest.mark.slow),
        pytest.param({"replicas": 2, "outer": OuterOptimizer(2)}, 4, marks=pytest.mark.slow),
        ({"reduce_codec": "int4", "error_feedback": True}, 2),
    ],
)
def test_in_the_dtype_of_masters_it_equals_gathers_that_encode(ranks, more, world_size):
    for resting, encoding in ranks(
        train_with_and_without, replace(FLOAT8, **more), world_size=world_size
    ):
        (outcome, state), (same_outcome, same_state) = resting, encoding
        assert outcome == same_outcome
        for name, tensors in state.items():
            for key, tensor in tensors.items():
                pairs = zip(tensor.pieces, same_state[name][key].pieces, strict=True)
                assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs), f"{name}.{key}"


def encoded_in_a_step(world: World, options: Options) -> tuple[int, int]:
    """How often a step of two microbatches encodes, and gathers."""
    strategy: Any = build_on_rank(world, Recipe(), Ours("zero3", options))
    run_steps(strategy, world, Recipe(), range(1))
    strategy.wire.take_traffic()
    calls: list[str] = []
    original = codecs.encode

    def counted(codec: str, values: Tensor) -> Tensor:
        calls.append(codec)
        return original(codec, values)

    codecs.encode = counted
    try:
        run_steps(strategy, world, Recipe(), range(1, 2))
    finally:
        codecs.encode = original
    return len(calls), strategy.wire.take_traffic().calls_by_kind["gather"]


def test_a_step_encodes_each_unit_once_and_gathers_encode_nothing(ranks):
    """Four units; the root is gathered in each of two microbatches, the blocks twice in each."""
    options = replace(FLOAT8, keep="last", prefetch=0)
    for encoded, gathered in ranks(encoded_in_a_step, options):
        assert (encoded, gathered) == (4, 2 * (1 + 2 * 3))
    for encoded, gathered in ranks(encoded_in_a_step, replace(options, masters_rest=False)):
        assert encoded == gathered


def test_masters_are_all_that_rests_of_weights():
    dtypes = Dtypes(torch.bfloat16, torch.float32, torch.float32)
    with fake_world(1, 4) as world:
        words: dict[str, Any] = {"dtypes": dtypes, "masters_rest": True}
        strategy = engine_of_nine_units("zero3", "buffer", world, **words)
        a_step(strategy, torch.bfloat16)
        held = bytes_by_kind(strategy.model_states())
        numel = sum(h.chunk.section_numel(1) for unit in strategy.units for h in unit.held)
    assert (held["parameters"], held["master"]) == (0, 4 * numel)


@pytest.mark.parametrize("offload", [None, "optimizer"])
def test_codes_are_all_that_rests_beside_masters(offload):
    """33 bytes of codes and factors for 32 elements; of bf16 nothing is left at rest."""
    dtypes = Dtypes(torch.bfloat16, torch.float32, torch.float32)
    with fake_world(1, 4) as world:
        words: dict[str, Any] = {"gather_codec": "float8", "masters_rest": True, "offload": offload}
        strategy = engine_of_nine_units("zero3", "buffer", world, dtypes=dtypes, **words)
        a_step(strategy, torch.bfloat16)
        states = strategy.model_states()
        held, masters_lie = bytes_by_kind(states), states.master if offload is None else states.host
        sections = [sum(h.chunk.section_numel(1) for h in unit.held) for unit in strategy.units]
    lie = {each.data_ptr() for each in masters_lie or ()}
    assert all(h.piece.data_ptr() in lie for unit in strategy.units for h in unit.held)
    assert held["parameters"] == sum(encoded_bytes("float8", numel) for numel in sections)
    masters = 4 * sum(sections)
    if offload is None:
        assert held["master"] == masters
    else:
        assert held["master"] == 0 and held["host"] >= masters


def saved_and_loaded(world: World) -> tuple[bool, bool, str]:
    """Whether a state is the same after it went through ZeRO-2 and back, and shows the same then."""
    recipe = Recipe(world_size=world.size, precision="bf16_master")
    first: Any = build_on_rank(world, recipe, Ours("zero3", FLOAT8))
    run_steps(first, world, recipe, range(2))
    saved = merge(worlds.gather_objects(pieces_of(first)))
    exact: Any = build_on_rank(world, recipe, Ours("zero2", Options(layout="parameter")))
    exact.load_state_dict(saved)
    again: Any = build_on_rank(world, recipe, Ours("zero3", FLOAT8))
    again.load_state_dict(merge(worlds.gather_objects(pieces_of(exact))))
    mine, theirs = pieces_of(first), pieces_of(again)
    same = all(
        torch.equal(a.tensor, b.tensor)
        for name, tensors in mine.items()
        for key, tensor in tensors.items()
        for a, b in zip(tensor.pieces, theirs[name][key].pieces, strict=True)
    )
    outcomes = [run_steps(each, world, recipe, range(2, 3)) for each in (first, again)]
    shown: list[dict[str, Tensor]] = []
    for strategy in (again, exact):
        strategy.load_state_dict(saved)
        with strategy.gathered():
            shown.append({n: p.detach().clone() for n, p in strategy.model.named_parameters()})
    ours, whole = shown
    is_shown = all(torch.equal(weight, whole[name]) for name, weight in ours.items())
    return same and outcomes[0] == outcomes[1], is_shown, again.settings["transport"]


def test_checkpoints_hold_masters_and_gathered_shows_them(ranks):
    for same, is_shown, transport in ranks(saved_and_loaded):
        assert same and is_shown and transport == "gloo"


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
@pytest.mark.parametrize("more", [{}, {"offload": "optimizer"}, {"gather_codec": None}])
def test_what_is_written_into_parameters_reaches_masters_and_codes(ranks, precision, more):
    answers = ranks(written, precision, replace(FLOAT8, **more))
    assert all((piece == 0.5).all() for pieces in answers for piece in pieces)
