"""Dtypes are read off what runs: a downcast that an engine or a model makes by itself is named by its role."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.composing import composed
from tests.plain_strategy import PlainStrategy
from tests.plan.real_steps import one_step
from tests.test_train import Linear, Numbers, make_config
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.engines.build import build_strategy
from zeroexp.interface.strategy import ModelStates
from zeroexp.measure.dtypes_found import DtypeRecorder, dtypes_asked
from zeroexp.measure.instruments import Instruments
from zeroexp.models.module import build_model
from zeroexp.process import world as worlds
from zeroexp.process.world import World
from zeroexp.report.meanings import NOT_AS_ASKED
from zeroexp.training.loop import train

FAULTS = {
    "none": "",
    "product": "products bfloat16 for float32",
    "product of one layer": "products float32+bfloat16 for float32",
    "weights": "weights bfloat16 for float32, products bfloat16 for float32, gradients bfloat16 for float32, "
    "moments bfloat16 for float32, reduced bfloat16 for float32, master bfloat16 for float32",
    "gradients": "gradients bfloat16 for float32, reduced bfloat16 for float32",
    "reduced": "gradients float32+bfloat16 for float32, reduced bfloat16 for float32",
    "moments": "moments bfloat16 for float32",
    "norm": "norm bfloat16 for float32",
}


class Rounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).bfloat16()


class Model(Linear):
    def __init__(self, fault: str) -> None:
        super().__init__()
        first = nn.Linear(4, 4, bias=False)
        kind = Rounded if fault.startswith("product") else nn.Linear
        self.layer = kind(4, 4, bias=False)
        self.first = first if fault == "product of one layer" else nn.Identity()
        self.to(torch.bfloat16 if fault == "weights" else torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x.to(self.layer.weight.dtype)))


class Faulty(PlainStrategy):
    """A plain engine that rounds what its fault says, without a word."""

    def __init__(self, fault: str) -> None:
        super().__init__(Model(fault))
        if fault not in ("gradients", "reduced"):  # Adam takes no gradients of another dtype
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.0, foreach=False)
        self._fault = fault
        for parameter in self.model.parameters():
            parameter.grad_dtype = None  # it may have any

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if self._fault == "gradients":
            self._round_gradients()

    def step(self, *, drain: bool = False) -> Tensor:
        if self._fault == "reduced":
            self._round_gradients()
        self._keep_moments_in(torch.float32)  # Adam steps no others
        norm = super().step(drain=drain)
        self._keep_moments_in(torch.bfloat16)
        return norm.bfloat16() if self._fault == "norm" else norm.float()

    def _keep_moments_in(self, dtype: torch.dtype) -> None:
        if self._fault == "moments":
            for own in self.optimizer.state.values():
                own.update({key: own[key].to(dtype) for key in ("exp_avg", "exp_avg_sq")})

    def model_states(self) -> ModelStates:
        states = super().model_states()
        for own in self.optimizer.state.values():
            states.optimizer.extend(own.values())
        return states

    def _round_gradients(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.bfloat16()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_downcast_is_named_by_its_role(tmp_path, fault) -> None:
    config = make_config(warmup=1, steps=1)
    with worlds.joined_process_group() as world:
        strategy = Faulty(fault)
        instruments = Instruments(config.train, world, tmp_path, strategy.model)
        list(train(strategy, Numbers(config), config=config, world=world, instruments=instruments))
    record = instruments.dtypes.as_record(dtypes_asked(config, [{}]))
    assert record.get(NOT_AS_ASKED, "") == FAULTS[fault]
    assert {"weights", "products", "reduced", "norm"} <= set(
        record["dtypes"].replace(",", "").split()
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_optimizer_is_given_is_read_whether_or_not_blocks_are_compiled(tmp_path, compiled):
    """Of compiled blocks no part is hooked, so that weights in use and products are not known."""
    config = make_config(warmup=1, steps=1)
    config.train.compile = compiled
    with worlds.joined_process_group() as world:
        strategy = Faulty("none")
        instruments = Instruments(config.train, world, tmp_path, strategy.model)
        list(train(strategy, Numbers(config), config=config, world=world, instruments=instruments))
    found = set(instruments.dtypes.by_role)
    assert found >= {"gradients", "reduced", "master", "moments", "norm"}
    assert ("weights" in found, "products" in found) == (not compiled, not compiled)


# Rows of optimizer.kinds, and the masters and moments that they ask for.
ASKED = {
    "": ("float32", "float32"),
    "{matrices: {moments: bfloat16}}": ("float32", "bfloat16+float32"),
    "{matrices: {moments: int8}}": ("float32", "int8"),
    "{embeddings: {master: bfloat16}}": ("bfloat16+float32", "bfloat16+float32"),
    "{*: {master: bfloat16}}": ("bfloat16", "bfloat16"),  # no other row has a parameter
    "{matrices: {name: muon, momentum: 0.9, moments: bfloat16}}": ("float32", "bfloat16+float32"),
}


@pytest.mark.parametrize("rows", ASKED)
def test_rows_ask_for_dtypes_of_their_own(rows) -> None:
    config = composed("model=tiny", "precision=bf16_master", f"+optimizer.kinds={rows or '{}'}")
    model = build_model(config.model, seed=0)
    groups = parameter_groups(model.module, config.optimizer, model.blocks)
    asked = dtypes_asked(config, groups)
    assert asked["reduced"] == asked["master"]
    words = ("+".join(sorted(asked[role].split("+"))) for role in ("master", "moments"))
    assert tuple(words) == ASKED[rows]


def _owns_one_kind(world: World) -> None:
    found = DtypeRecorder()
    found.note("master", torch.zeros(2, dtype=(torch.float32, torch.bfloat16)[world.rank]))
    found.by_role["moments"] = dict.fromkeys(("float32", "int8")[world.rank : world.rank + 1])
    found.gather()
    assert found.as_record({"master": "bfloat16+float32", "moments": "int8"}).keys() == {"dtypes"}


def test_what_each_rank_owns_counts(ranks) -> None:
    ranks(_owns_one_kind)


def _weights_in_use(world: World, implementation: str) -> set[str]:
    words = ("model=tiny", "model.hf_config.tie_word_embeddings=false", "strategy.unit=layer")
    engine = ("strategy=zero3", f"strategy.implementation={implementation}", "world_size=2")
    config = composed(*words, *engine, "precision=bf16_master", "data.global_batch_size=2")
    model, found = build_model(config.model, seed=0), DtypeRecorder()
    strategy = build_strategy(config, model, world)
    with found.watching(strategy.model.modules()):
        one_step(strategy, torch.arange(8).view(1, 8), 1)
    return {*found.by_role["weights"]}


@pytest.mark.parametrize("implementation", ["buffer", "torch"])
def test_weights_are_those_that_a_module_ran_with(ranks, implementation) -> None:
    """A head of its own is a unit, which is sharded again when it has run."""
    assert ranks(_weights_in_use, implementation) == [{"bfloat16"}] * 2
