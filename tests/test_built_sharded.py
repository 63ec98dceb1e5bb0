"""A model is built on meta and cut as its values come: the same bits, and never the whole of it in one place."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.composing import composed
from tests.crossed import every_nth
from tests.model_folders import assert_same as assert_tensors_same
from tests.oracle import Recipe, assembled, configured, pieces_of
from tests.shrunk import shrunk
from zeroexp.config.keys import ModelConfig
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.interface.values import Read, fill_in, make_placeholders
from zeroexp.measure.memory import AllocationMeter, bytes_by_kind, count_cpu_allocations
from zeroexp.models import deferred, mlp
from zeroexp.models.deferred import CannotDefer, defer
from zeroexp.models.module import BuiltModel, build_deferred, build_model
from zeroexp.process.world import World, fake_world

FAMILIES = ["parameter", "tensor", "buffer"]
NAMES = ["gpt2_tiny", "mixtral_tiny", "mlp_tiny", "moe_tiny", "tiny"]
SMALLEST = {"llama": "tiny", "mixtral": "mixtral_tiny", "gpt2": "gpt2_tiny"}


def model_config(name: str, **changes: Any) -> ModelConfig:
    company = ["data=vectors"] if name.startswith("mlp") else []
    return replace(composed(f"model={name}", *company).model, **changes)


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(ours, kind)(), getattr(theirs, kind)(), strict=True)
        for (name, a), (other, b) in pairs:
            assert name == other and a.dtype == b.dtype and torch.equal(a, b), name


# --- the same bits


@pytest.mark.parametrize("name", NAMES)
def test_what_is_drawn_later_is_what_the_constructor_draws(name):
    torch.manual_seed(5)
    undisturbed = torch.rand(1)
    torch.manual_seed(5)
    built = build_deferred(model_config(name), seed=3)
    assert built.values is not None and all(p.is_meta for p in built.module.parameters())
    fill_in(built.module, built.values)
    whole = build_model(model_config(name), seed=3)
    assert torch.equal(torch.rand(1), undisturbed), "the caller's random state is its own"
    assert built.blocks == whole.blocks
    assert_same(built.module, whole.module)


class Odd(nn.Module):
    """Every way in which a constructor may come to its values."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Parameter(torch.empty(6, 4))
        nn.init.orthogonal_(self.orthogonal)
        self.drawn = nn.Parameter(torch.randn(7) * 2 + 1)
        self.half_drawn = nn.Parameter(torch.ones(3, 4))
        with torch.no_grad():
            self.half_drawn[1:].normal_()
        self.embedding = nn.Embedding(9, 4, padding_idx=2)
        self.copied = nn.Linear(4, 9, bias=False)
        with torch.no_grad():
            self.copied.weight.copy_(self.embedding.weight * 0.5)
        nn.init.uniform_(self.embedding.weight[3])
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)
        self.attention = nn.MultiheadAttention(4, 2)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.number = nn.Parameter(torch.empty(()).uniform_())
        self.register_buffer("table", torch.arange(6.0).cumsum(0))


def test_any_constructor_draws_the_same_later():
    module, values = defer(Odd, 11, lambda made: made)
    assert all(p.is_meta for p in module.parameters())
    fill_in(module, values)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        assert_same(module, Odd())
    assert not module.frozen.requires_grad and module.orthogonal.requires_grad


def test_what_is_drawn_alone_brings_what_it_is_made_of():
    _, values = defer(Odd, 11, lambda made: made)
    alone = {name: read(0, 36).clone() for name, read in values.only({"copied.weight"})}
    with torch.random.fork_rng():
        torch.manual_seed(11)
        embedding = torch.empty(9, 4).normal_()
    embedding[2] = 0  # the padding
    assert_tensors_same(alone, {"copied.weight": embedding.view(-1) * 0.5})


def test_recurrent_layers_which_watch_their_weights_can_be_built_later():
    def make() -> nn.LSTM:
        return nn.LSTM(3, 4, num_layers=2, bidirectional=True)

    module, values = defer(make, 5, lambda made: made)
    make_placeholders(module, torch.device("cpu"))
    module(torch.zeros(2, 3))
    fill_in(module, values)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        plain = make()
    assert_same(module, plain)
    inputs = torch.arange(6.0).view(2, 3)
    assert torch.equal(module(inputs)[0], plain(inputs)[0])


class ReadsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3).normal_())
        self.factor = float(self.weight[0])


class DrawsUntilItFits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 9.0))
        while self.weight.detach().abs().max() > 2:
            nn.init.normal_(self.weight)


class DrawsABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.randn(3))


class DrawsInto(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(3).normal_())


@pytest.mark.parametrize("make", [ReadsItself, DrawsUntilItFits, DrawsABuffer, DrawsInto])
def test_a_constructor_that_needs_what_it_draws_can_not_be_deferred(make):
    with pytest.raises(CannotDefer):
        defer(make, 0, lambda made: made)


def by_mask(weight: torch.Tensor) -> None:
    weight[weight < 0] = 5.0


def by_indices(weight: torch.Tensor) -> None:
    weight[torch.tensor([0, 2])] = 1.0


def by_list(weight: torch.Tensor) -> None:
    weight[[0, 2]] = 1.0


def where_positive(weight: torch.Tensor) -> None:
    weight.copy_(torch.where(weight > 0, weight, 0))


def sparsely(weight: torch.Tensor) -> None:
    nn.init.sparse_(weight, 0.5)


def seeded(weight: torch.Tensor) -> None:
    torch.manual_seed(42)
    weight.normal_()


def seeded_apart(weight: torch.Tensor) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        weight.normal_()


def drawn_again(weight: torch.Tensor) -> None:
    state = torch.get_rng_state()
    torch.rand(3)
    torch.set_rng_state(state)
    weight.normal_()


def of_a_generator(weight: torch.Tensor) -> None:
    weight.normal_(generator=torch.Generator().manual_seed(42))


def seeded_of_its_own(weight: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(42)
    weight[0].normal_(generator=generator)
    weight[1:3].normal_(generator=generator)
    generator.manual_seed(42)
    weight[3].normal_(generator=generator)


def by_scratch(weight: torch.Tensor) -> None:
    row = torch.zeros(4)
    for index in range(4):
        row[index] = 1
        weight[index].copy_(row)
        row[index] = 0


def by_scratch_of_numpy(weight: torch.Tensor) -> None:
    row = np.zeros(4, dtype=np.float32)
    for index in range(4):
        row[:] = index
        weight[index].copy_(torch.from_numpy(row))


def by_itself(weight: torch.Tensor) -> None:
    weight.copy_(torch.arange(16.0).view(4, 4))
    weight.fill_(weight[1, 2])


def by_element(weight: torch.Tensor) -> None:
    weight.detach().apply_(lambda value: 1.0)


@pytest.mark.parametrize(
    ("initialise", "is_deferred"),
    [
        *((each, True) for each in (by_mask, by_indices, where_positive, sparsely, of_a_generator)),
        *((each, True) for each in (by_scratch, by_scratch_of_numpy, by_itself)),
        *((each, None) for each in (by_list,)),  # by how torch makes a tensor of a list
        *((each, False) for each in (seeded, seeded_apart, drawn_again, by_element)),
        (seeded_of_its_own, False),
    ],
)
def test_what_a_constructor_writes_is_drawn_bit_for_bit_or_refused(initialise, is_deferred):
    found = deferred_as_built_plainly(initialise)
    assert is_deferred in (None, found)


@pytest.mark.parametrize(
    ("initialise", "is_deferred"),
    [(by_itself, True), (by_scratch, False), (by_scratch_of_numpy, False)],
)
def test_a_large_tensor_is_copied_from_only_where_it_stays_as_it_is(
    initialise, is_deferred, monkeypatch
):
    monkeypatch.setattr(deferred, "LARGEST_SCRATCH", 8)
    assert deferred_as_built_plainly(initialise) is is_deferred


def copied_from(source: torch.Tensor, write: Callable[[torch.Tensor], object]) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(source.shape))
    with torch.no_grad():
        module.weight.copy_(source)
    write(source)
    return module


def test_a_large_tensor_is_not_read_whole():
    """This one would take 4 TiB to copy, as a view that is not contiguous was."""
    source = torch.ones(()).expand(1 << 20, 1 << 20)
    _, values = defer(lambda: copied_from(source, lambda _: None), 3, lambda made: made)
    assert values.fingerprint()


@pytest.mark.parametrize(
    "write",
    [
        lambda source: source[1].zero_(),
        lambda source: source.numpy().__setitem__((7, 5), 2),
        lambda source: source.numpy().__setitem__([1, 900], source.numpy()[[900, 1]]),
    ],
    ids=["by torch", "one element by NumPy", "two rows in each other's place"],
)
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_large_tensor_that_is_written_is_noticed(write, is_turned):
    source = torch.arange(5 << 20, dtype=torch.float32).view(1 << 10, -1)
    source = source.t() if is_turned else source
    with pytest.raises(CannotDefer, match="a large tensor was changed"):
        defer(lambda: copied_from(source, write), 3, lambda made: made)


def deferred_as_built_plainly(initialise: Callable[[torch.Tensor], None]) -> bool:
    """Tell whether a constructor can be deferred; where it can, assert that all values are those of a plain build."""

    def construct() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with torch.no_grad():
            initialise(module[0].weight)
            module[1].weight.uniform_()
        return module

    torch.manual_seed(3)
    plain = construct()
    before = torch.get_rng_state()
    try:
        module, values = defer(construct, 3, lambda made: made)
    except CannotDefer:
        return False
    finally:
        assert torch.equal(torch.get_rng_state(), before)
    make_placeholders(module, torch.device("cpu"))
    for _ in range(2):  # an engine may be built again of the same values
        fill_in(module, values)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(torch.get_rng_state(), before)
    return True


def test_a_model_that_can_not_be_deferred_is_built_whole(monkeypatch, capsys):
    def with_blocks(shape: object) -> nn.Module:
        module = DrawsUntilItFits()
        module.blocks = nn.ModuleList([nn.Linear(3, 3)])
        return module

    monkeypatch.setattr(mlp, "Mlp", with_blocks)
    built = build_deferred(model_config("mlp_tiny"), seed=3)
    assert built.values is None
    assert not any(p.is_meta for p in built.module.parameters())
    assert "built whole before it is cut: aten._local_scalar_dense" in capsys.readouterr().out


@pytest.fixture(scope="module", params=["llama", "gpt2", "mixtral"])
def folder(request, tmp_path_factory) -> tuple[str, Path]:
    """The weights of a family, drawn from a seed that no other test uses."""
    path = tmp_path_factory.mktemp(request.param)
    build_model(model_config(SMALLEST[request.param]), seed=99).module.save_pretrained(path)  # type: ignore[operator]
    return SMALLEST[request.param], path


def test_weights_of_files_and_a_new_head_are_those_that_transformers_makes(folder):
    name, path = folder
    config = model_config(name, weights=str(path), task="classification", num_labels=5)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        kind = transformers.AutoModelForSequenceClassification
        expected = kind.from_pretrained(path, num_labels=5, pad_token_id=0)
    assert_same(build_model(config, seed=4).module, expected)


# --- in every engine


MASTERS = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16_master": torch.float32}
FEW = [
    *(("zero3", family, "bf16_master") for family in ("parameter", "buffer", "torch")),
    ("zero1", "tensor", "bf16_master"),
    ("ddp", "buffer", "fp32"),
    ("ddp", "torch", "bf16"),
]
ALL = [
    *((stage, family, "bf16_master") for stage in STAGES for family in FAMILIES),
    *((stage, "torch", "fp32") for stage in ("ddp", "zero1", "zero2", "zero3")),
]


def states(
    world: World, config: ModelConfig, engine: tuple[str, str, str]
) -> tuple[Any, dict[str, Tensor], Any, dict[str, Tensor]]:
    """State and buffers of the engine around a model on meta, then those around a whole one."""
    stage, family, precision = engine
    recipe = Recipe(precision=precision)
    told: list[Any] = []
    for built in (build_deferred(config, seed=3), build_model(config, seed=3)):
        strategy = make_engine(built, stage, family, recipe, world)
        told += [pieces_of(strategy)]
        told += [{n: b.clone() for n, b in built.module.named_buffers()}]
    return tuple(told)


def make_engine(built: BuiltModel, stage: str, family: str, recipe: Any, world: World) -> Any:
    return configured(stage, family)(built, recipe, world)


def all_states(world: World, config: ModelConfig, engines: list[Any]) -> list[Any]:
    return [states(world, config, engine) for engine in engines]


@pytest.mark.parametrize(
    ("engines", "world_size"),
    [(FEW, 2), *(pytest.param(ALL, size, marks=pytest.mark.slow) for size in (1, 2, 3))],
)
def test_every_engine_starts_from_the_same_bits(ranks, engines, world_size):
    config = shrunk("small", num_layers=2)
    plain = dict(build_model(config, seed=3).module.named_parameters())
    answers = ranks(all_states, config, engines, world_size=world_size)
    for engine, per_rank in zip(engines, zip(*answers, strict=True), strict=True):
        later, _, whole, _ = zip(*per_rank, strict=True)
        ours, theirs = assembled(later), assembled(whole)
        assert ours.keys() == theirs.keys()
        for name, first in plain.items():  # before any rounding to the dtype of compute
            assert torch.equal(theirs[name]["weight"], first.to(MASTERS[engine[2]])), (engine, name)
        for name in theirs:
            assert torch.equal(ours[name]["weight"], theirs[name]["weight"]), (engine, name)
        for _, buffers, _, expected in per_rank:
            assert buffers.keys() == expected.keys() and buffers
            for name, values in expected.items():
                assert torch.equal(buffers[name], values), (engine, name)


def build_with_other_seeds(world: World, config: ModelConfig, family: str) -> None:
    built = build_deferred(config, seed=world.rank)
    with pytest.raises(ValueError, match=r"^ranks would start from different weights"):
        make_engine(built, "zero3", family, Recipe(), world)


@pytest.mark.parametrize("family", ["buffer", "torch"])
def test_ranks_that_would_start_from_different_weights_are_refused(ranks, family):
    ranks(build_with_other_seeds, shrunk("tiny"), family)


def test_meta_without_values_and_values_without_meta_are_one_line():
    with fake_world(0, 2) as world:
        built = build_deferred(model_config("tiny"), seed=0)
        with pytest.raises(ValueError, match=r"parameter .* is on meta: give values="):
            make_engine(replace(built, values=None), "zero3", "buffer", Recipe(), world)
        whole = build_model(model_config("tiny"), seed=0)
        with pytest.raises(
            ValueError, match=r"parameter .* has values already: build the model on"
        ):
            make_engine(replace(whole, values=built.values), "zero3", "buffer", Recipe(), world)


# --- never the whole of it in one place


MODEL = "small"  # 94 MiB of parameters
NUM_RANKS = 16


@pytest.fixture(scope="module")
def weights_of_small(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("small")
    build_model(model_config(MODEL), seed=1).module.save_pretrained(path)  # type: ignore[operator]
    return path


def unit_bytes(built: BuiltModel) -> list[int]:
    """Bytes of the units in float32, largest first: the blocks, and what is outside of them."""
    blocks = [
        sum(p.nbytes for p in built.module.get_submodule(b).parameters()) for b in built.blocks
    ]
    root = sum(p.nbytes for p in built.module.parameters()) - sum(blocks)
    return sorted([*blocks, root], reverse=True)


def held_now() -> int:
    gc.collect()
    held = AllocationMeter(torch.device("cpu")).peak_bytes()
    assert held is not None
    return held


BUILT = [("parameter", "files"), ("tensor", "seed"), ("buffer", "seed"), ("torch", "files")]


@every_nth(2, "family, source", BUILT)
def test_building_peaks_at_the_states_and_two_units(family, source, weights_of_small):
    """On one of 16 ranks, whose peers do not exist; the whole model is ten times as large."""
    assert count_cpu_allocations() is None
    weights = str(weights_of_small) if source == "files" else None
    with fake_world(5, NUM_RANKS) as world:
        before = held_now()
        meter = AllocationMeter(torch.device("cpu"))
        built = build_deferred(model_config(MODEL, weights=weights), seed=3)
        units = unit_bytes(built)
        strategy = make_engine(built, "zero3", family, Recipe(), world)
        peak = (meter.peak_bytes() or 0) - before
        states = bytes_by_kind(strategy.model_states())
        share = sum(units) / NUM_RANKS
        assert states["parameters"] >= share
        assert peak <= sum(states.values()) + units[0] + units[1], (peak, states, units)
        assert peak < sum(units) / 2


class Counting:
    """Values that count the elements each parameter is asked for."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self.read: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[str, Read]]:
        for name, read in self._values:

            def counted(start: int, stop: int, name: str = name, read: Read = read) -> Tensor:
                self.read[name] = self.read.get(name, 0) + stop - start
                return read(start, stop)

            yield name, counted

    def fingerprint(self) -> int:
        return 0


@pytest.mark.parametrize("family", [*FAMILIES, "torch"])
def test_ranks_read_every_element_once_together(family):
    read: dict[str, int] = {}
    for rank in range(3):
        with fake_world(rank, 3) as world:
            built = build_deferred(model_config("tiny"), seed=3)
            values = Counting(built.values)
            make_engine(replace(built, values=values), "zero3", family, Recipe(), world)
            for name, number in values.read.items():
                read[name] = read.get(name, 0) + number
    whole = build_model(model_config("tiny"), seed=0, device="meta").module
    assert read == {name: p.numel() for name, p in whole.named_parameters()}


class Small(nn.Sequential):
    """A model of one's own, of which the engine knows nothing."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))


def losses_of_a_library_user(world: World, deferred: bool) -> list[float]:
    torch.manual_seed(2)
    model, values = defer(Small, 2, lambda made: made) if deferred else (Small(), None)
    strategy = Sharded(
        model,
        blocks=["0", "1", "2"],
        stage=STAGES["zero3"],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=lambda groups: torch.optim.AdamW(groups, lr=0.01),
        world=world,
        values=values,
    )
    losses = []
    for _ in range(3):
        with strategy.microbatch(last=True):
            strategy.backward(loss := strategy.model(torch.ones(2, 8)).sum())
        strategy.step(drain=True)
        strategy.zero_grad()
        losses.append(loss.item())
    return losses


def test_what_is_built_later_trains_as_what_was_built_whole(ranks):
    later, whole = (ranks(losses_of_a_library_user, deferred) for deferred in (True, False))
    assert later == whole and later[0][0] != later[0][-1]
