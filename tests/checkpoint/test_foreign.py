"""Checkpoints of other trainers: brought in and gone on from, and ours given to them, weights and moments bit for bit.

The other trainer goes on by itself, and whoever takes its checkpoint arrives at the same bits: two ranks, since the sum
of two does not depend on an order.
"""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.checkpoint.other_trainers import (
    FORMS,
    RECIPE,
    SAVED,
    State,
    adamw,
    save_alone,
    train_fsdp2,
)
from tests.checkpoint.saving import resume_each
from tests.composing import compose_once, composed
from tests.engines import DEEPSPEED, EVERY_ENGINE, FLOAT32_ROUNDING, NEEDS_DEEPSPEED
from tests.models_for_tests import _llama
from tests.oracle import Make, Recipe, assembled, build_on_rank, pieces_of, run_steps
from tests.small_disks import files_of_at_most
from zeroexp import export
from zeroexp.checkpoint.manifest import read_manifest
from zeroexp.checkpoint.resume import resolve_resume
from zeroexp.checkpoint.save import Saver
from zeroexp.checkpoint.weights import Weights
from zeroexp.config.keys import Config, ConfigError, ModelConfig, resolve
from zeroexp.config.optimizer import OPTIMIZERS, OptimizerKind
from zeroexp.foreign import READERS, WRITERS
from zeroexp.foreign.__main__ import main
from zeroexp.foreign.deepspeed_zero import read_deepspeed
from zeroexp.foreign.foreign_checkpoint import Place
from zeroexp.foreign.into_checkpoint import import_checkpoint
from zeroexp.interface.quantized_moments import to_step
from zeroexp.interface.strategy import CanonicalState
from zeroexp.measure.memory import AllocationMeter, count_cpu_allocations
from zeroexp.models.module import build_model
from zeroexp.process.world import World

# What torch warns of where one process saves and loads.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ZERO3 = EVERY_ENGINE["zero3_buffer"].make


def config_of(optimizer: str = "adamw", **shape: int | bool) -> Config:
    hf_config = {**_llama.keywords, **shape}
    config = Config(model=ModelConfig(family="llama", hf_config=hf_config))
    config.optimizer = RECIPE.optimizer_config()
    config.optimizer.name = optimizer
    config.data.global_batch_size = 2
    return config


def brought_in(folder: Path, target: Path, config: Config, step: int | None = None):
    (read,) = [read for is_one, read in READERS.values() if is_one(folder)]
    return import_checkpoint(read, folder, config, target, step)


def require_same(ours: State, theirs: State, atol: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensors in theirs.items():
        assert ours[name].keys() == tensors.keys(), name
        for key, tensor in tensors.items():
            assert ours[name][key].dtype == tensor.dtype, f"{name}.{key}"
            furthest = (ours[name][key] - tensor).abs().max() if tensor.numel() else 0
            assert furthest <= atol, f"{name}.{key}"


def goes_on(ranks, *checkpoints: Path) -> list[tuple[State, State]]:
    """Under our ZeRO-3: the state as loaded, and at the end, of each."""
    answers = ranks(resume_each, RECIPE, ZERO3, [(each, True) for each in checkpoints])
    return [
        (assembled([first for first, _ in each]), assembled([rest[1] for _, rest in each]))
        for each in zip(*answers, strict=True)
    ]


# -- FSDP2 ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fsdp2_is_brought_in_and_goes_on(ranks, tmp_path):
    """Its states nested or flat, and as torchtitan saves them."""
    (saved, ended), _ = ranks(train_fsdp2, tmp_path)
    left_out = {"titan": ["left out, as neither weights nor moments: train_state.step"]}
    checkpoints: list[Path] = []
    for form in FORMS:
        run = tmp_path / f"from_{form}"
        checkpoint, notes = brought_in(tmp_path / form, run, config_of())
        assert checkpoint == run / "checkpoint" / f"step-{SAVED:06d}"
        assert notes == left_out.get(form, [])
        checkpoints.append(checkpoint)
    for loaded, at_end in goes_on(ranks, *checkpoints):
        require_same(loaded, saved)
        require_same(at_end, ended)


def test_fsdp2_takes_ours_and_goes_on(ranks, tmp_path):
    states = ranks(train_ours, config_of(), tmp_path)
    checkpoint = export.choose_checkpoint(tmp_path)
    assert any(len(t.pieces) > 1 for _, t in read_manifest(checkpoint).tensors()), "of two ranks"
    export.export_whole(checkpoint, tmp_path / "to", "dcp")
    for form in ("nested", "flat"):
        (ended,), _ = ranks(train_fsdp2, tmp_path / "to", form)
        require_same(assembled(states), ended)


def test_torchs_own_muon_takes_ours(tmp_path):
    config = config_of("muon")

    def of_torch(lr: float) -> tuple[Any, list[torch.optim.Optimizer]]:
        model: Any = build_model(config.model, seed=1).module
        matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "layers" in n]
        rest = [p for n, p in model.named_parameters() if p.ndim < 2 or "layers" not in n]
        return model, [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(rest, lr=lr)]

    model, pair = of_torch(0.02)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in pair:
        each.step()
    save_quietly(tmp_path / "theirs", model, pair)
    checkpoint, _ = brought_in(tmp_path / "theirs", tmp_path / "run", config)
    export.export_whole(checkpoint, tmp_path / "to", "dcp")

    other, others = of_torch(123.0)
    for each in others:  # of which a load asks for the rate at first
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1.0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"optimizer": get_optimizer_state_dict(other, others, options=options)}
    dcp.load(state, checkpoint_id=tmp_path / "to", no_dist=True)
    set_optimizer_state_dict(other, others, state["optimizer"], options=options)
    assert others[0].param_groups[0]["lr"] == config.optimizer.lr
    assert others[0].param_groups[0]["initial_lr"] == config.optimizer.lr
    for mine, theirs in zip(others, pair, strict=True):
        of_mine, of_theirs = (list(each.state.values()) for each in (mine, theirs))
        assert len(of_mine) == len(of_theirs) > 0
        for own, meant in zip(of_mine, of_theirs, strict=True):
            assert own.keys() == meant.keys()
            assert all(torch.equal(own[key], meant[key]) for key in meant)


def test_moments_in_8_bits_leave_as_what_they_stand_for(ranks, tmp_path):
    states = assembled(ranks(train_in_8_bits, tmp_path))
    checkpoint = export.choose_checkpoint(tmp_path)
    manifest = read_manifest(checkpoint)
    weights = Weights(checkpoint, manifest)
    in_blocks = 0
    for name, own in states.items():
        for key, rests in own.items():
            of_elements = key in ("exp_avg", "exp_avg_sq")
            expected = to_step(rests, own["weight"]) if of_elements else rests
            found, empty = weights.read(name, key), weights.empty(name, key)
            assert (empty.shape, empty.dtype) == (found.shape, found.dtype)
            assert found.dtype == torch.float32 and torch.equal(found, expected), f"{name}.{key}"
            in_blocks += rests.dtype is torch.int8
    assert in_blocks


def train_in_8_bits(world: World, run: Path) -> CanonicalState:
    recipe = Recipe("large", moments="int8")
    strategy = build_on_rank(world, recipe, ZERO3)
    run_steps(strategy, world, recipe, range(1))
    saver = Saver(run, strategy, config_of(), world)
    saver.save_now(1)
    saver.close()
    return pieces_of(strategy)


def train_ours(world: World, config: Config, run: Path) -> CanonicalState:
    strategy = build_on_rank(world, RECIPE, ZERO3)
    run_steps(strategy, world, RECIPE, range(SAVED))
    saver = Saver(run, strategy, config, world)
    saver.save_now(SAVED)
    saver.close()
    run_steps(strategy, world, RECIPE, range(SAVED, RECIPE.steps))
    return pieces_of(strategy)


# -- DeepSpeed --------------------------------------------------------------------------------------

# Its ZeRO-3 and ours differ in the last bits of this model, with no checkpoint between.
OF_RANK_0 = "zero_pp_rank_0_mp_rank_00"
ATOL = {**dict.fromkeys(DEEPSPEED, 0.0), "deepspeed_zero3": FLOAT32_ROUNDING}


@NEEDS_DEEPSPEED[0]
@NEEDS_DEEPSPEED[1]
@pytest.mark.parametrize(
    ("engine", "model", "precision"),
    [
        *((engine, model, "fp32") for engine in DEEPSPEED for model in ("toy", "llama")),
        *((f"deepspeed_{stage}", "toy", "bf16_master") for stage in ("zero1", "zero2")),
    ],
)
def test_deepspeed_is_brought_in_and_goes_on(ranks, tmp_path, engine, model, precision):
    """The toy has frozen parameters and a tied one; what its own script makes of the files has the same weights."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    recipe = replace(RECIPE, model=model, precision=precision)
    answers = ranks(train_deepspeed, recipe, EVERY_ENGINE[engine].make, tmp_path / "theirs")
    saved, ended = (assembled(states) for states in zip(*answers, strict=True))
    found = read_deepspeed(tmp_path / "theirs", set())
    ours: State = {}
    for place, each in found.tensors.items():
        found.read(place, tensor := torch.empty_like(each, device="cpu"))
        ours.setdefault(place.name, {})[place.key] = tensor
    require_same(ours, saved)
    if (engine, precision) != (
        "deepspeed_zero1",
        "bf16_master",
    ):  # of which it says "not a zero checkpoint"
        for name, weight in get_fp32_state_dict_from_zero_checkpoint(tmp_path / "theirs").items():
            assert name not in ours or torch.equal(ours[name]["weight"].float(), weight.float())
    if model == "llama":
        checkpoint, notes = brought_in(tmp_path / "theirs", tmp_path / "run", config_of())
        assert notes == []
        ((loaded, at_end),) = goes_on(ranks, checkpoint)
        require_same(loaded, saved)
        require_same(at_end, ended, ATOL[engine])


@NEEDS_DEEPSPEED[0]
@NEEDS_DEEPSPEED[1]
@pytest.mark.parametrize("engine", ["deepspeed_zero2", "deepspeed_zero3"])
def test_what_deepspeed_makes_universal_is_brought_in(ranks, tmp_path, engine):
    """By its own script, of which zero3's has neither shapes nor counters in the files of parameters."""
    from deepspeed.checkpoint import ds_to_universal

    answers = ranks(train_deepspeed, RECIPE, EVERY_ENGINE[engine].make, tmp_path / "theirs")
    step = tmp_path / "theirs" / f"global_step{SAVED}"
    to = tmp_path / "universal" / "step"
    words = {"input_folder": str(step), "output_folder": str(to), "num_extract_workers": 1}
    words |= {"num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    ds_to_universal.main(Namespace(**words, inject_missing_state=True))
    checkpoint, notes = brought_in(to.parent, tmp_path / "run", config_of())
    assert notes == []
    ((loaded, _),) = goes_on(ranks, checkpoint)
    require_same(loaded, assembled([saved for saved, _ in answers]))


def test_what_we_make_universal_is_what_we_read(first, tmp_path):
    export.export_whole(first, tmp_path / "to", "deepspeed")
    again, notes = brought_in(tmp_path / "to", tmp_path / "again", config_of())
    assert notes == [] and again.name == first.name
    assert hashes(again) == hashes(first)


def hashes(checkpoint: Path) -> dict[str, list[str]]:
    return {n: [p.hash for p in t.pieces] for n, t in read_manifest(checkpoint).tensors()}


@NEEDS_DEEPSPEED[0]
@NEEDS_DEEPSPEED[1]
@pytest.mark.parametrize("engine", DEEPSPEED)
def test_deepspeed_takes_ours_and_goes_on(ranks, tmp_path, engine):
    states = ranks(train_ours, config_of(), tmp_path)
    export.export_whole(export.choose_checkpoint(tmp_path), tmp_path / "to", "deepspeed")
    ended = ranks(go_on_under_deepspeed, EVERY_ENGINE[engine].make, tmp_path / "to")
    require_same(assembled(states), assembled(ended), ATOL[engine])


def train_deepspeed(
    world: World, recipe: Recipe, make: Make, folder: Path
) -> tuple[CanonicalState, CanonicalState]:
    strategy: Any = build_on_rank(world, recipe, make)
    run_steps(strategy, world, recipe, range(SAVED))
    strategy.model.save_checkpoint(str(folder))
    saved = pieces_of(strategy)
    run_steps(strategy, world, recipe, range(SAVED, recipe.steps))
    return saved, pieces_of(strategy)


def go_on_under_deepspeed(world: World, make: Make, folder: Path) -> CanonicalState:
    strategy: Any = build_on_rank(world, RECIPE, make)
    strategy.model._config.load_universal_checkpoint = True
    strategy.model.load_checkpoint(str(folder))
    # Its loader gives all groups of zero3 one counter of steps, which then counts once for each group.
    for state in strategy.optimizer.state.values():
        state["step"] = state["step"].clone()
    run_steps(strategy, world, RECIPE, range(SAVED, RECIPE.steps))
    return pieces_of(strategy)


def test_frozen_parameters_of_zero3_on_one_rank_are_brought_in(tmp_path):
    """Files as DeepSpeed writes them of an offloaded run: no whole weight, and of what is frozen one fragment."""
    trained, frozen = torch.arange(6.0), torch.arange(4.0)
    state = {"fp32_flat_groups": [trained], "partition_count": 1}
    state["optimizer_state_dict"] = {"state": {0: {"step": torch.tensor(3.0)}}}
    model = {"module": dict.fromkeys(("trained", "frozen"), torch.empty(0)), "buffer_names": []}
    model |= {"param_shapes": [{"trained": (2, 3)}], "shared_params": {}}
    model |= {"frozen_param_shapes": {"frozen": (2, 2)}}
    torch.save({"optimizer_state_dict": state}, tmp_path / f"{OF_RANK_0}_optim_states.pt")
    torch.save(
        {**model, "frozen_param_fragments": {"frozen": frozen}},
        tmp_path / f"{OF_RANK_0}_model_states.pt",
    )
    found = read_deepspeed(tmp_path, set())
    for name, values in (("trained", trained.view(2, 3)), ("frozen", frozen.view(2, 2))):
        found.read(Place(name, "weight"), there := torch.full_like(values, -1.0))
        assert found.tensors[Place(name, "weight")].shape == values.shape
        assert torch.equal(there, values)


# -- what is refused --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Of one process: with moments in `whole`, without in `weights`."""
    folder = tmp_path_factory.mktemp("alone")
    model, optimizer = stepped(config_of())
    save_quietly(folder / "whole", model, optimizer)
    save_quietly(folder / "weights", model, None)
    return folder


@pytest.fixture(scope="module")
def first(alone, tmp_path_factory) -> Path:
    """The checkpoint that `whole` becomes, which no test changes."""
    return brought_in(alone / "whole", tmp_path_factory.mktemp("first") / "run", config_of())[0]


def stepped(config: Config):
    model = build_model(config.model, seed=1).module
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_quietly(folder: Path, *state: Any) -> None:
    save_alone(folder, *state)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            config_of(num_hidden_layers=3),
            "model.layers.2.self_attn.q_proj.weight and 8 more of this model not in it",
        ),
        (
            config_of(num_hidden_layers=1),
            "model.layers.1.self_attn.q_proj.weight and 8 more of it not in this model",
        ),
        (
            config_of(intermediate_size=9),
            "model.layers.0.mlp.gate_proj.weight and 5 more of another shape, [10, 12] in it and [9, 12] here",
        ),
        (
            config_of("sgd"),
            "optimizer.name=sgd: it keeps momentum_buffer, and {} holds exp_avg, exp_avg_sq, step of "
            "model.embed_tokens.weight",
        ),
    ],
    ids=["missing", "too_many", "shape", "optimizer"],
)
def test_what_does_not_fit_is_refused_by_name(alone, tmp_path, config, problem):
    with pytest.raises(ConfigError) as refused:
        brought_in(alone / "whole", tmp_path / "run", config)
    assert problem.format(alone / "whole") in str(refused.value) and "; name the " in str(
        refused.value
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("prefix", "around"), [("", True), ("state.", False), ("state.", True), ("app.state.", True)]
)
def test_names_around_the_model_change_nothing(first, tmp_path, prefix, around):
    """The trainer's own, in which "state" may stand, and those of a module around the model, as DDP is one."""
    model, optimizer = stepped(config_of())
    holder = model
    if around:
        holder = torch.nn.Module()
        holder.net = torch.nn.ModuleDict({"model": model})
    save_quietly(tmp_path / "theirs", holder, optimizer, prefix)
    checkpoint, notes = brought_in(tmp_path / "theirs", tmp_path / "run", config_of())
    assert notes == [] and hashes(checkpoint) == hashes(first)


def test_averages_before_the_model_are_said_to_be_left_out(first, tmp_path):
    model, optimizer = stepped(config_of())
    averages = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    state = {"ema": averages, "model": get_model_state_dict(model)}
    state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    checkpoint, notes = brought_in(tmp_path / "theirs", tmp_path / "run", config_of())
    assert hashes(checkpoint) == hashes(first)
    assert len(notes) == 1 and "neither weights nor moments: ema." in notes[0]


@pytest.mark.parametrize("form", WRITERS)
def test_a_model_that_is_built_otherwise_today_is_one_line(first, tmp_path, monkeypatch, form):
    """Under other names, of another version of transformers or of somebody's own code."""
    manifest = read_manifest(first)
    state = {name.replace("mlp", "ffn"): entry for name, entry in manifest.state.items()}
    monkeypatch.setattr(export, "read_manifest", lambda _: replace(manifest, state=state))
    with pytest.raises(ConfigError, match=r"the checkpoint's model: .* here; export it with the"):
        export.export_whole(first, tmp_path / "to", form)
    assert not any(tmp_path.iterdir())


def test_moments_of_what_is_frozen_here_are_said_to_be_left_out(alone, tmp_path):
    config = config_of()
    config.model.freeze = ["model.layers.1.mlp.*"]
    checkpoint, notes = brought_in(alone / "whole", tmp_path / "run", config)
    frozen = "model.layers.1.mlp.gate_proj.weight"
    assert notes == [f"left out, as frozen here: the moments of {frozen} and 2 more"]
    assert read_manifest(checkpoint).state[frozen].keys() == {"weight"}


def test_moments_of_another_shape_are_refused(tmp_path):
    model, optimizer = stepped(config_of())
    optimizer.state[model.model.norm.weight]["exp_avg"] = torch.zeros(3)
    save_quietly(tmp_path / "theirs", model, optimizer)
    problem = r"exp_avg of model.norm.weight is \[3\], the parameter \[12\]; give another"
    with pytest.raises(ConfigError, match=problem):
        brought_in(tmp_path / "theirs", tmp_path / "run", config_of())


class StepsInTraining(torch.optim.AdamW):
    """As those of ScheduleFree, which refuse a step before this."""

    in_training = False

    def train(self) -> None:
        self.in_training = True

    def step(self, closure: Any = None) -> None:
        assert self.in_training, "call train() first"
        super().step()


def test_what_an_optimizer_keeps_is_read_off_a_step_as_the_loop_makes_it(tmp_path):
    save_quietly(tmp_path / "theirs", *stepped(config_of()))
    kind = OptimizerKind(lambda groups, config: StepsInTraining(groups), lambda config: 2)
    OPTIMIZERS.add("in_training", kind)
    try:
        _, notes = brought_in(tmp_path / "theirs", tmp_path / "run", config_of("in_training"))
    finally:
        OPTIMIZERS.remove("in_training")
    assert notes == []


def test_weights_without_moments_are_said_to_be_so(ranks, alone, tmp_path):
    for step in (None, 0, -3):
        with pytest.raises(ConfigError, match="holds no number of steps; set --step to 1 or more"):
            brought_in(alone / "weights", tmp_path / "run", config_of(), step)
    checkpoint, notes = brought_in(alone / "weights", tmp_path / "run", config_of(), step=7)
    first = "model.embed_tokens.weight and 19 more"
    assert notes == [f"no moments of {first}: the optimizer begins anew there"]
    assert read_manifest(checkpoint).step == 7
    one = replace(RECIPE, world_size=1)  # as many as wrote it, and it has no random states
    ((answer,),) = ranks(resume_each, one, ZERO3, [(checkpoint, False)], world_size=1)
    assert {key for entry in answer[0].values() for key in entry} == {"weight"}
    with pytest.raises(ConfigError, match=r"--step=0: .* counts 1; leave it out"):
        brought_in(alone / "whole", tmp_path / "again", config_of(), step=0)


@pytest.mark.parametrize("form", ["dcp", "deepspeed"])
def test_steps_that_updated_nothing_are_counted_all_the_same(alone, first, tmp_path, form):
    """In float16 one that overflows: data and learning rate go on behind it, and Adam counts its updates."""
    folder, step = alone / "whole", 8
    if form == "deepspeed":
        export.export_whole(first, folder := tmp_path / "to", form)
        for file in folder.glob("*/*_model_states.pt"):
            torch.save({**torch.load(file), "global_steps": 8}, file)
        step = None
        with pytest.raises(ConfigError, match=r"--step=9: .* counts 8; leave it out"):
            brought_in(folder, tmp_path / "run", config_of(), step=9)
    checkpoint, _ = brought_in(folder, tmp_path / "run", config_of(), step)
    assert checkpoint.name == "step-000008"
    manifest = read_manifest(checkpoint)
    assert (manifest.step, manifest.samples_seen) == (8, 16)
    read = Weights(checkpoint, manifest).read
    assert {float(read(n, "step")) for n, e in manifest.state.items() if "step" in e} == {1.0}


def test_weights_that_were_trained_apart_do_not_become_tied(tmp_path):
    model, _ = stepped(config_of(tie_word_embeddings=False))
    save_quietly(tmp_path / "theirs", model, None)
    both = "lm_head.weight and model.embed_tokens.weight differ in it"
    with pytest.raises(ConfigError, match=both):
        brought_in(tmp_path / "theirs", tmp_path / "run", config_of(), step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_bf16_is_taken_as_it_is_and_said(tmp_path):
    config = config_of()
    model = build_model(config.model, seed=1, dtype=torch.bfloat16).module
    save_quietly(tmp_path / "theirs", model, None)
    checkpoint, notes = brought_in(tmp_path / "theirs", tmp_path / "run", config, step=1)
    assert notes[0] == "its weights are bfloat16, and taken as they are"
    assert {entry["weight"].dtype for entry in read_manifest(checkpoint).state.values()} == {
        "bfloat16"
    }


def test_what_is_cut_short_is_refused(alone, tmp_path):
    for file, problem in (
        (".metadata", "torch can not read it"),
        ("__0_0.distcp", "can not read optimizer.state."),
    ):
        theirs = tmp_path / file
        shutil.copytree(alone / "whole", theirs)
        content = (theirs / file).read_bytes()
        (theirs / file).write_bytes(content[: len(content) * 3 // 4])
        with pytest.raises(ConfigError, match=f"{problem}.*; give another checkpoint"):
            brought_in(theirs, tmp_path / "run", config_of())
        assert not (tmp_path / "run").exists()


def test_what_lacks_elements_or_was_written_by_an_older_version_is_refused(first, tmp_path):
    export.export_whole(first, tmp_path / "to", "deepspeed")
    (moment,) = tmp_path.glob("to/*/zero/model.norm.weight/exp_avg.pt")
    whole = torch.load(moment)
    torch.save({**whole, "param": whole["param"][:5]}, moment)
    problem = r"holds 5 of 12 elements of exp_avg of model.norm.weight; copy what is missing"
    with pytest.raises(ConfigError, match=problem):
        brought_in(tmp_path / "to", tmp_path / "again", config_of())
    (counters,) = tmp_path.glob("to/*/zero_pp_rank_0_mp_rank_00_model_states.pt")
    content = torch.load(counters)
    torch.save({key: content[key] for key in content.keys() - {"param_shapes"}}, counters)
    with pytest.raises(
        ConfigError, match=r"it has no 'param_shapes'.*; save it by a newer version"
    ):
        brought_in(tmp_path / "to", tmp_path / "again", config_of())


def test_a_full_disk_leaves_nothing_behind(alone, first, tmp_path):
    writes = [lambda: brought_in(alone / "whole", tmp_path / "again", config_of())]
    writes += [partial(export.export_whole, first, tmp_path / form, form) for form in WRITERS]
    for write in writes:
        with (
            files_of_at_most(1000),
            pytest.raises(ConfigError, match="File too large; make room there"),
        ):
            write()
    assert not any(tmp_path.iterdir())


# -- memory -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_tensor_of_each_is_in_memory_at_a_time(tmp_path):
    """The one that is written, and theirs as it is read. An embedding and its moments are most: 3 x 4 of 12.4 MB."""
    config = config_of(vocab_size=16384, hidden_size=64, intermediate_size=64)
    save_quietly(tmp_path / "theirs", *stepped(config))
    largest = 16384 * 64 * 4
    assert count_cpu_allocations() is None
    for num, action in (
        (2, lambda: brought_in(tmp_path / "theirs", tmp_path / "run", config)),
        (
            1,
            lambda: export.export_whole(
                export.choose_checkpoint(tmp_path / "run"), tmp_path / "to", "dcp"
            ),
        ),
    ):
        before = AllocationMeter(torch.device("cpu")).peak_bytes()
        meter = AllocationMeter(torch.device("cpu"))
        action()
        peak = meter.peak_bytes()
        assert before is not None and peak is not None
        assert num * largest <= peak - before <= (num + 0.2) * largest


# -- the command ------------------------------------------------------------------------------------


def test_the_command_makes_what_resume_takes(tmp_path, capsys, monkeypatch):
    words = ("model=tiny", "model.hf_config.vocab_size=null", "optimizer.fused=false")
    config = resolve(deepcopy(composed(*words)))
    config.model.hf_config["vocab_size"] = 300  # the data decides, and the embedding tells
    save_quietly(tmp_path / "theirs", *stepped(config))
    compose_once(monkeypatch)

    def command(folder: Path, *more: str) -> tuple[int, str]:
        line = ["zeroexp import", str(folder), "--to", str(tmp_path / "run"), *words, *more]
        monkeypatch.setattr("sys.argv", line)
        code = main()
        output, errors = capsys.readouterr()
        return code, (errors if code else output).splitlines()[-1]

    checkpoint = tmp_path / "run" / "checkpoint" / "step-000001"
    for folder, more, problem in (
        (tmp_path, (), "no checkpoint of dcp, deepspeed, universal; give the folder of one step"),
        (tmp_path / "theirs", ("optimizer.lr=1,2",), "2 runs; give the words of one"),
        (tmp_path / "theirs", ("model=nano",), "model=nano"),
    ):
        code, line = command(folder, *more)
        assert code == 2 and problem in line and line.startswith("zeroexp: "), line
    told = f"{checkpoint}: go on from it with resume={tmp_path / 'run'}"
    assert command(tmp_path / "theirs") == (0, told)
    code, line = command(tmp_path / "theirs")
    assert code == 2 and "exists already" in line
    resumed = replace(deepcopy(composed(*words)), resume=str(tmp_path / "run"))
    assert resolve_resume(resolve(resumed)) == str(checkpoint)


TITAN = {
    "model.embed_tokens.": "tok_embeddings.",
    "lm_head.": "output.",
    "model.norm.": "norm.",
    "model.layers": "layers",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{each}_proj": f"attention.w{each}" for each in "qkv"},
}


def in_titans_words(name: str, *, qkv: str = "") -> str:
    for ours, theirs in TITAN.items():
        name = name.replace(ours, theirs)
    return re.sub(r"attention\.(w[qkv])", rf"attention.{qkv}\1", name)


def turned(heads: Tensor, positions: Tensor, *, in_pairs: bool) -> Tensor:
    """Rotary positions of [token, head, head_dim]: of neighbours, as torchtitan's; of halves, as transformers'."""
    size = heads.shape[-1] // 2
    angles = positions[:, None, None] * 100.0 ** -(torch.arange(size) / size)
    one, other = (heads[..., 0::2], heads[..., 1::2]) if in_pairs else heads.split(size, -1)
    whole = torch.complex(one, other) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(whole)


def test_phi_3_whose_own_rows_are_fused_is_brought_in(tmp_path):
    keys = {"model_type": "phi3", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 11}
    keys |= {"num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
    config = config_of()
    config.model = ModelConfig(family="hf", hf_config=keys)
    model, optimizer = stepped(config)
    save_quietly(tmp_path / "theirs", model, optimizer)
    checkpoint, notes = brought_in(tmp_path / "theirs", tmp_path / "run", config)
    weights = Weights(checkpoint, read_manifest(checkpoint))
    assert notes == [] and any(".qkv_proj." in name for name in weights.shapes)
    for name, parameter in model.named_parameters():
        for key, each in {"weight": parameter, **optimizer.state[parameter]}.items():
            assert torch.equal(weights.read(name, key), each), f"{name}.{key}"


@pytest.mark.parametrize("qkv", ["", "qkv_linear."])  # of 2024, and of 2026
def test_torchtitans_own_names_are_those_of_transformers(tmp_path, qkv):
    """Queries and keys turn in pairs there: the same scores come of weights whose rows are in another order."""
    config = config_of(tie_word_embeddings=False)
    model, optimizer = stepped(config)
    theirs = {in_titans_words(n, qkv=qkv): p.detach() for n, p in model.named_parameters()}
    states = {
        f"{in_titans_words(n, qkv=qkv)}.{key}": each
        for n, p in model.named_parameters()
        for key, each in optimizer.state[p].items()
    }
    state = {**theirs, "optimizer": {f"state.{key}": each for key, each in states.items()}}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    checkpoint, notes = brought_in(tmp_path / "theirs", tmp_path / "run", config)
    assert notes == []
    manifest = read_manifest(checkpoint)
    weights, keywords = Weights(checkpoint, manifest), config.model.hf_config
    head_dim = keywords["hidden_size"] // keywords["num_attention_heads"]
    x, positions = torch.randn(5, keywords["hidden_size"]), torch.arange(5.0)
    for name, _ in model.named_parameters():
        own = in_titans_words(name, qkv=qkv)
        for key in manifest.state[name]:
            ours = weights.read(name, key)
            given = theirs[own] if key == "weight" else states[f"{own}.{key}"]
            if (".q_proj" not in name and ".k_proj" not in name) or key == "step":
                assert torch.equal(ours, given), f"{name}.{key}"
                continue
            of_ours, of_theirs = (
                (x @ each.T).unflatten(1, (-1, head_dim)) for each in (ours, given)
            )
            scores = (
                turned(of_ours, positions, in_pairs=False),
                turned(of_theirs, positions, in_pairs=True),
            )
            assert torch.equal(*scores) or torch.allclose(*scores, atol=1e-6), f"{name}.{key}"
            assert key != "weight" or not torch.equal(ours, given)
