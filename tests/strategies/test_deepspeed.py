"""What is DeepSpeed's own: what it holds and sends, its rounding, what is refused. The rest: test_contract.py."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from tests.composing import composed
from tests.engines import DEEPSPEED, NEEDS_DEEPSPEED, Engine
from tests.engines import check as check_engine
from tests.oracle import (
    Make,
    Recipe,
    Rules,
    assembled,
    build_on_rank,
    configured,
    pieces_of,
    run_steps,
)
from tests.plan.test_torch_closed_forms import check_held, check_wire, config_of
from zeroexp.check import check
from zeroexp.config.keys import ConfigError, UndefinedCombination
from zeroexp.interface.canonical import merge
from zeroexp.interface.strategy import CanonicalState
from zeroexp.models.read_weight_files import read_headers, read_tensor
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.process.world import RankInfo, World, environment_of_rank

pytestmark = list(NEEDS_DEEPSPEED)
STAGES = ("zero1", "zero2", "zero3")
IMPLEMENTATION = ("strategy.implementation=deepspeed",)


def check_stages(world: World, accumulation: int, precision: str) -> None:
    words = (*IMPLEMENTATION, f"precision={precision}", "model.freeze=[*layers.0.*]")
    for stage in STAGES:
        check_held(world, config_of(stage, world.size, accumulation, *words), accumulation)


@pytest.mark.parametrize("precision", ["fp32", "bf16_master", "paper16"])
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (3, 2)])
def test_real_ranks_hold_what_the_form_says(ranks, world_size, accumulation, precision):
    ranks(check_stages, accumulation, precision, world_size=world_size)


@pytest.mark.parametrize("stage", STAGES)
def test_the_wire_carries_what_the_form_says(ranks, stage):
    words = (*IMPLEMENTATION, "model.hf_config.hidden_size=136")
    ranks(check_wire, stage, words, ["zero3"], world_size=2)


def test_linear_layers_of_zero3_round_before_the_bias(ranks):
    engine = replace(DEEPSPEED["deepspeed_zero3"], exact_up_to=0)
    check_engine(ranks, engine, Recipe(precision="bf16_master"))


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_in_bfloat16(ranks, stage):
    """paper16: microbatches are added in the dtype that is sent too."""
    reduce_each = DEEPSPEED[f"deepspeed_{stage}"].rules.reduce_each
    exact_up_to = 0 if stage == "zero3" else 2
    engine = Engine(
        configured(stage, "deepspeed"),
        Rules(reduce_each, missing="zeros"),
        exact_up_to,
        ("paper16",),
    )
    check_engine(ranks, engine, Recipe(precision="paper16"))


REFUSED = {
    ("strategy=ddp",): "use one of zero1, zero2, zero3",
    ("strategy=zero1_allreduce",): "use one of zero1, zero2, zero3",
    ("strategy=zero2", "precision=autocast"): "use precision=fp32, bf16_master or paper16",
    ("strategy=zero2", "optimizer=muon"): "cuts the matrices that optimizer.name=muon steps whole",
    ("strategy=zero2", "precision=bf16"): "use precision=fp32, bf16_master or paper16",
    ("strategy=zero2", "model=moe_tiny", "data=synthetic"): "hangs where ranks skip modules",
    ("strategy=zero2", "strategy.bucket_mb=3"): "no effect, deepspeed's engines do not have it",
    (
        "strategy=zero1",
        "+strategy.settings.stage3_max_reuse_distance=9",
    ): "has no effect in strategy=zero1",
    ("strategy=zero3", "+strategy.settings.overlap_comm=2"): "overlap_comm=2 is no bool",
    ("strategy=zero3", "+strategy.settings.bucket=2"): "strategy.settings.bucket=2",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_it_can_not_do_or_ignores_is_refused(words):
    config = composed("model=tiny", *words, "strategy.implementation=deepspeed")
    with pytest.raises(ConfigError, match=re.escape(REFUSED[words])):
        check(config)


def test_a_plan_of_what_stays_gathered_is_refused():
    words = ("strategy=zero3", "+strategy.settings.stage3_prefetch_bucket_size=9")
    config = composed("model=tiny", *words, "strategy.implementation=deepspeed")
    with pytest.raises(UndefinedCombination, match="bucket_size=9: DeepSpeed decides"):
        form_of(config, build_on_meta(config), "gloo")


def test_a_parameter_without_gradient_does_not_get_its_last_one_again(ranks):
    """zero3 never clears the room of gradients."""
    recipe = Recipe(model="moe_by_turns", world_size=1, accumulation=1)
    check_engine(ranks, DEEPSPEED["deepspeed_zero3"], recipe)


ITS_OWN = {
    "reduce_bucket_size": 500_000_000,
    "overlap_comm": True,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}


def loaded_into_another(world: World, recipe: Recipe, make: Make):
    """The state behind a step, and that of an engine which has loaded it; both train another step."""
    states = [build_on_rank(world, recipe, make) for _ in range(2)]
    first, second = states
    run_steps(first, world, recipe, range(1))
    second.load_state_dict(merge(everywhere(pieces_of(first), world)))
    loaded = pieces_of(second)
    outcomes = [run_steps(strategy, world, recipe, range(1, 2)) for strategy in states]
    return pieces_of(first), loaded, outcomes


def everywhere(own: CanonicalState, world: World) -> list[CanonicalState]:
    states: list[CanonicalState] = [{} for _ in range(world.size)]
    torch.distributed.all_gather_object(states, own)
    return states


@pytest.mark.parametrize("stage", STAGES)
def test_with_deepspeeds_own_settings(ranks, stage):
    """Parameters that stay gathered train alike, and are loaded too."""
    given = {k: v for k, v in ITS_OWN.items() if stage == "zero3" or not k.startswith("stage3")}
    engine = DEEPSPEED[f"deepspeed_{stage}"]
    engine = replace(engine, make=configured(stage, "deepspeed", settings=given))
    check_engine(ranks, engine, Recipe())
    for *_, (one, other) in ranks(loaded_into_another, Recipe(), engine.make):
        assert (one.losses, one.norms) == (other.losses, other.norms)


def through_its_own_checkpoint(world: World, recipe: Recipe, make: Make, folder: str):
    """The state behind a step, that of an engine which has read DeepSpeed's checkpoint of it, and a step of both."""
    first, second = (build_on_rank(world, recipe, make) for _ in range(2))
    run_steps(first, world, recipe, range(1))
    first.model.save_checkpoint(folder)
    second.model.load_checkpoint(folder)
    states = [pieces_of(strategy) for strategy in (first, second)]
    return *states, [run_steps(each, world, recipe, range(1, 2)) for each in (first, second)]


@pytest.mark.parametrize(
    ("stage", "precision"), [("zero1", "bf16_master"), ("zero2", "fp32"), ("zero3", "bf16_master")]
)
def test_checkpoints_of_deepspeed(ranks, stage, precision, tmp_path):
    """`strategy.model` writes and reads them. DeepSpeed's script makes weights of them, which `model.weights` reads."""
    recipe, make = Recipe(precision=precision), configured(stage, "deepspeed")
    answers = ranks(through_its_own_checkpoint, recipe, make, str(tmp_path / "saved"))
    states, loaded = ([answer[i] for answer in answers] for i in (0, 1))
    torch.testing.assert_close(assembled(loaded), assembled(states), rtol=0, atol=0)
    for *_, (one, other) in answers:
        assert (one.losses, one.norms) == (other.losses, other.norms)
    if stage == "zero1":
        return  # the script takes bf16_master's for no checkpoint, and drops frozen parameters of fp32's
    script = import_module("deepspeed.utils.zero_to_fp32")
    script.convert_zero_checkpoint_to_fp32_state_dict(
        str(tmp_path / "saved"), str(tmp_path / "weights")
    )
    found, state = read_headers(tmp_path / "weights"), assembled(states)
    assert set(found) == {*state, "head.weight"}  # which is tied
    for name, entry in state.items():
        assert torch.equal(read_tensor(found[name]).float(), entry["weight"].float()), name


def build_as_under_slurm(world: World) -> None:
    """Without the variables of torchrun, which are not set afterwards either."""
    names = set(environment_of_rank(RankInfo(0, 1, 0)))
    own = {name: os.environ.pop(name) for name in names}
    build_on_rank(world, Recipe(), configured("zero1", "deepspeed"))
    assert not names & set(os.environ)
    os.environ.update(own)


def test_under_slurm(ranks):
    ranks(build_as_under_slurm)
