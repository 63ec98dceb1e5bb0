"""A key of strategy, precision, optimizer or model shows where WITNESSES says, under every engine, or is refused.

One rank of a world that does not exist shows what it holds, what torch.distributed is called with, and the operators
that torch dispatches; real ranks over gloo show numbers. Nothing is read that the code under test counts of itself.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from tests.composing import CONF, composed, values_of
from tests.model_folders import saved
from tests.ranks import Ranks
from zeroexp.check import check
from zeroexp.check.try_points import try_points
from zeroexp.check.without_effect import check_effects
from zeroexp.check.witnesses import HELD, NUMBERS, OPERATIONS, SENT, TABLES, WITNESSES
from zeroexp.commandline import help
from zeroexp.config import plugins
from zeroexp.config.keys import ENGINE_SETTINGS, KEYS, Config, ConfigError, from_mapping
from zeroexp.data.batches import build_data
from zeroexp.engines.build import build_strategy
from zeroexp.interface.strategy import Strategy
from zeroexp.measure.record import StepRecord
from zeroexp.models.checkpointing import checkpoint_as_configured
from zeroexp.models.module import build_model
from zeroexp.models.published_config import adopt_published_config
from zeroexp.plan.stand_ins import buckets_in_python
from zeroexp.process.world import World, barrier, fake_world, joined_process_group
from zeroexp.training.loop import train

OF_TRAINING = ("strategy.", "precision.", "optimizer.", "model.")
OURS = ("buffer", "parameter", "tensor")
DDP, FSDP2 = ("ddp", "zero1"), ("zero2", "zero3")  # of torch
ENGINES = (*OURS, *DDP, *FSDP2)
TORCH = (*DDP, *FSDP2)
SMALL = (
    "model=tiny data=synthetic data.seq_len=8 data.micro_batch_size=1 cluster.device=cpu "
    "train.warmup_steps=0 train.steps=2 tracking=files"
)
Line = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A change of a key, the words that give it its effect, and the engines that take it."""

    change: str
    engines: Sequence[str] = ENGINES
    given: str = ""
    world_size: int = 2
    seen: str | None = None  # where these engines show it; None: where WITNESSES says


MUON, PAPER, BF16 = "optimizer=muon", "precision=paper16", "precision=bf16_master"
ROWS = "data=hf data.path=rows.csv"
LABELS = "model.task=classification data.task=classification"
LORA, PUBLISHED = "model.lora.r=2", "model=hf model.path=one"
RECOMPUTED = f"{PUBLISHED} train.activation_checkpointing=true"
GROUPS = "strategy.replicas=2"
OUTER = f"{GROUPS} strategy.outer.every=1"
OFFLOAD = "strategy.offload=optimizer"
# More blocks than are on their way, each of two groups, so that messages are unpacked when they arrive.
FOUR_BLOCKS = "strategy=zero1 model.hf_config.num_hidden_layers=4 +optimizer.kinds.vectors.lr=0.5"
MINE = "strategy.name=mine strategy="
# An engine that takes no case of a key refuses the last one, for its change or already for what is given.
CASES: dict[str, list[Case]] = {
    "strategy.name": [
        Case("strategy=zero2", [*OURS, "zero3"]),
        Case("strategy=zero1", ["ddp"]),
        Case("strategy=ddp", ["zero1"]),
        Case("strategy=zero3", ["zero2"]),
    ],
    "strategy.parameters.placement": [
        Case("strategy.parameters.placement=replicate", OURS, f"{MINE}zero3")
    ],
    "strategy.gradients.placement": [
        Case("strategy.gradients.placement=partial", OURS, f"{MINE}zero2")
    ],
    "strategy.optimizer.placement": [
        Case("strategy.optimizer.placement=shard", OURS, f"{MINE}ddp")
    ],
    "strategy.parameters.dtype": [
        Case("strategy.parameters.dtype=bfloat16", OURS),
        Case("strategy.parameters.dtype=float8", OURS),
        Case("strategy.parameters.dtype=master", OURS, BF16),
    ],
    "strategy.gradients.dtype": [
        Case("strategy.gradients.dtype=bfloat16", OURS, BF16),
        Case("strategy.gradients.dtype=bfloat16", []),
    ],
    "strategy.optimizer.dtype": [
        Case("strategy.optimizer.dtype=bfloat16", OURS, PAPER),
        Case("strategy.optimizer.dtype=bfloat16", []),
    ],
    "strategy.implementation": [
        Case("strategy.implementation=tensor", ["buffer", "parameter"]),
        Case("strategy.implementation=buffer", ["tensor", *TORCH]),
    ],
    "strategy.unit": [Case("strategy.unit=model", OURS)],
    "strategy.overlap": [Case("strategy.overlap=false", OURS)],
    "strategy.owners": [Case("strategy.owners=contiguous", ["parameter"])],
    "strategy.prefetch": [Case("strategy.prefetch=2", OURS)],
    "strategy.keep": [Case("strategy.keep=none", OURS)],
    "strategy.reduce_each": [Case("strategy.reduce_each=step", OURS)],
    "strategy.publish": [Case("strategy.publish=forward", OURS, FOUR_BLOCKS)],
    "strategy.bucket_mb": [Case("strategy.bucket_mb=0.01", OURS)],
    "strategy.replicas": [Case("strategy.replicas=2", [*OURS, *FSDP2], world_size=4)],
    "strategy.optimizer.over": [Case("strategy.optimizer.over=all", OURS, GROUPS, world_size=4)],
    "strategy.outer.every": [Case("strategy.outer.every=1", OURS, GROUPS, world_size=4)],
    "strategy.outer.lr": [Case("strategy.outer.lr=1", OURS, OUTER, world_size=4)],
    "strategy.outer.momentum": [Case("strategy.outer.momentum=0", OURS, OUTER, world_size=4)],
    "strategy.gather_codec": [Case("strategy.gather_codec=int8", OURS)],
    "strategy.reduce_codec": [Case("strategy.reduce_codec=int8", OURS)],
    "strategy.error_feedback": [
        Case("strategy.error_feedback=true", OURS, "strategy.reduce_codec=int4")
    ],
    "strategy.secondary_partition": [
        Case("strategy.secondary_partition=2", OURS, "cluster.link=1gbit", world_size=4)
    ],
    "strategy.matrix_step": [
        Case("strategy.matrix_step=gather", ["buffer", "tensor"], MUON, world_size=4)
    ],
    "strategy.offload": [Case("strategy.offload=optimizer", OURS)],
    "strategy.offload_fraction": [Case("strategy.offload_fraction=0.5", OURS, OFFLOAD)],
    "strategy.offload_folder": [Case("strategy.offload_folder=/tmp", OURS, OFFLOAD)],
    "strategy.gradient_as_bucket_view": [
        Case("strategy.gradient_as_bucket_view=false", DDP, world_size=1)
    ],
    "strategy.settings": [Case("+strategy.settings.mine=1", [])],
    "precision.name": [Case("precision.name=mine")],
    "precision.compute": [
        Case("precision.compute=bfloat16", OURS),
        Case("precision=bf16", DDP),
        Case("precision.compute=bfloat16", FSDP2, seen=SENT),
    ],
    "precision.reduce": [
        Case("precision.reduce=bfloat16", [*OURS, *FSDP2], BF16),
        Case("precision.reduce=bfloat16", []),
    ],
    "precision.master": [
        Case("precision.master=bfloat16", OURS, PAPER),
        Case("precision.master=bfloat16", []),
    ],
    "precision.autocast": [Case("precision.autocast=true", DDP)],
    "optimizer.name": [Case("optimizer.name=sgd")],
    "optimizer.lr": [Case("optimizer.lr=0.5")],
    "optimizer.betas": [Case("optimizer.betas=[0.5,0.5]")],
    "optimizer.eps": [Case("optimizer.eps=0.1")],
    "optimizer.momentum": [Case("optimizer.momentum=0.5", given="optimizer=sgd")],
    "optimizer.moments": [
        Case("optimizer.moments=bfloat16"),
        Case("optimizer.moments=int8", [*OURS, *DDP]),
    ],
    "optimizer.weight_decay": [Case("optimizer.weight_decay=0.5")],
    "optimizer.decay_norms_and_biases": [Case("optimizer.decay_norms_and_biases=true")],
    "optimizer.fused": [Case("optimizer.fused=false")],
    "optimizer.max_grad_norm": [Case("optimizer.max_grad_norm=0.01")],
    "optimizer.schedule": [Case("optimizer.schedule=linear")],
    "optimizer.warmup_steps": [Case("optimizer.warmup_steps=2")],
    "optimizer.min_lr_ratio": [
        Case("optimizer.min_lr_ratio=0.5", given="optimizer.schedule=cosine")
    ],
    "optimizer.settings": [Case("optimizer.settings.ns_steps=2", [*OURS, *DDP], MUON)],
    "optimizer.kinds": [Case("+optimizer.kinds.vectors.lr=0.5")],
    "model.name": [Case("model.name=mine")],
    "model.family": [Case("model=gpt2_tiny")],
    "model.task": [Case(f"{LABELS} model.num_labels=2", given=ROWS)],
    "model.num_labels": [Case("model.num_labels=3", given=f"{ROWS} {LABELS} model.num_labels=2")],
    "model.hf_config": [Case("model.hf_config.intermediate_size=48")],
    "model.mlp": [Case("model.mlp.depth=3", given="model=mlp_tiny data=vectors")],
    "model.moe": [Case("model.moe.num_experts=2", [*OURS, *DDP], "model=moe_tiny")],
    "model.weights": [Case("model.weights=one")],
    "model.freeze": [Case("model.freeze=['*mlp*']")],
    "model.lora.r": [Case("model.lora.r=4", given=LORA)],
    "model.lora.lora_alpha": [Case("model.lora.lora_alpha=32", given=LORA)],
    "model.lora.use_rslora": [Case("model.lora.use_rslora=true", given=LORA)],
    "model.lora.target_modules": [Case("model.lora.target_modules=[up_proj]", given=LORA)],
    "model.lora.layers_to_transform": [Case("model.lora.layers_to_transform=[0]", given=LORA)],
    "model.lora.modules_to_save": [Case("model.lora.modules_to_save=[mlp]", given=LORA)],
    "model.lora.quantize": [Case("model.lora.quantize=int8", given=LORA)],
    "model.path": [Case("model.path=other", given=PUBLISHED)],
    "model.init": [Case("model.init=random", given=PUBLISHED)],
    "model.blocks": [
        Case("model.blocks=[model.layers.1]", [*OURS, *FSDP2], PUBLISHED),
        Case("model.blocks=[model.layers.1]", DDP, RECOMPUTED, seen=OPERATIONS),
    ],
    "model.published": [Case("+model.published.hidden_size=32", [])],
    "model.settings": [Case("+model.settings.mine=1", [])],
}


# -- what is observed


class Dispatched(TorchDispatchMode):
    """The operators that torch dispatches, and of collectives the dtype and size of every tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[Any] = []
        self.sent: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func)
        if func.namespace == "c10d":
            tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            self.sent[str(func), *((t.dtype, t.numel()) for t in tensors)] += 1
        return func(*args, **(kwargs or {}))


def trained(world: World, config: Config) -> tuple[list[StepRecord], Strategy]:
    data = build_data(config.data, config.model, config.train.seed)
    model = build_model(config.model, seed=config.train.seed, vocab_size=data.vocab_size)
    checkpoint_as_configured(model.module, model.blocks, config.train)
    strategy = build_strategy(config, model, world)
    return list(train(strategy, data, config=config, world=world)), strategy


@cache
def seen_by_one_rank(line: Line) -> dict[str, Any]:
    """What the second of ranks that do not exist holds, sends and does in a step of two microbatches.

    Alone, DDP's reducer is the real one.
    """
    config = config_of(line)
    config = replace(config, train=replace(config.train, steps=1))
    alone = config.world_size == 1
    world_of_one_rank = joined_process_group() if alone else fake_world(1, config.world_size)
    with (
        nullcontext() if alone else buckets_in_python(),
        world_of_one_rank as world,
        Dispatched() as dispatched,
    ):
        records, _ = trained(world, config)
    return {HELD: records[-1].memory_bytes, SENT: dispatched.sent, OPERATIONS: dispatched.names}


def numbers_of(world: World, config: Config, folder: Path) -> str:
    """A hash of two steps' losses, norms, and this rank's pieces of weights and moments after them.

    Files are named as in the folder.
    """
    with chdir(folder):
        records, strategy = trained(world, config)
    numbers = hashlib.sha256(repr([(each.loss, each.grad_norm) for each in records]).encode())
    for name, tensors in strategy.state_dict().items():
        for key, tensor in tensors.items():
            for piece in tensor.pieces:
                numbers.update(f"{name} {key} {piece.start} {piece.tensor.dtype}".encode())
                numbers.update(piece.tensor.contiguous().view(torch.uint8).numpy().tobytes())
    barrier()  # no rank closes its connections while another still reads
    return numbers.hexdigest()


# -- the walk


def takers_of(cases: list[Case]) -> list[tuple[Case, str]]:
    return [(case, engine) for case in cases for engine in case.engines]


def refusers_of(cases: list[Case]) -> list[str]:
    takers = {engine for _, engine in takers_of(cases)}
    return [engine for engine in ENGINES if engine not in takers]


# key=value: what is wrong; what helps
REFUSED = re.compile(r"(strategy|precision|optimizer|model)[\w.]*=.+: .+; .+")


class Walk:
    """Tries keys; `problems` are those that show nothing, or that a combination neither takes nor refuses."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._numbers: dict[Line, Any] = {}
        self.problems: list[str] = []

    def take(self, key: str, case: Case, engine: str) -> None:
        before, after = line_of(engine, case), line_of(engine, case, changed=True)
        if refused := refusal(before) or refusal(after):
            self.problems.append(f"{key}, {engine}: refused ({refused})")
            return
        where = case.seen or WITNESSES[key][0]
        places = (HELD, SENT, OPERATIONS, NUMBERS) if where == TABLES else (where,)
        for place in places:
            differs = self._seen(place, before) != self._seen(place, after)
            if differs == (where == TABLES):
                shows = "differ" if differs else "do not differ"
                self.problems.append(f"{key}, {engine}, {case.change}: {place} {shows}")

    def refuse(self, key: str, case: Case, engine: str) -> None:
        line = refusal(line_of(engine, case, changed=True))
        if line is None or not REFUSED.fullmatch(line):
            self.problems.append(f"{key}, {engine}: {case.change} is not refused ({line})")

    def _seen(self, place: str, line: Line) -> Any:
        if place != NUMBERS:
            return seen_by_one_rank(line)[place]
        if line not in self._numbers:
            config = config_of(line)
            size = config.world_size
            config = replace(config, data=replace(config.data, global_batch_size=size))
            self._numbers[line] = self._ranks(numbers_of, config, Path.cwd(), world_size=size)
        return self._numbers[line]


def line_of(engine: str, case: Case, *, changed: bool = False) -> Line:
    """The words of a command line; of two with one key the latter counts."""
    stage, implementation = ("zero3", engine) if engine in OURS else (engine, "torch")
    strategy = f"strategy={stage} strategy.implementation={implementation}"
    batch = f"world_size={case.world_size} data.global_batch_size={2 * case.world_size}"
    line = f"{SMALL} {strategy} {batch} {case.given} {case.change if changed else ''}"
    return tuple({word.partition("=")[0]: word for word in line.split()}.values())


@cache
def config_of(line: Line) -> Config:
    config = from_mapping(Config, values_of(*line))
    return plugins.with_settings(adopt_published_config(config))


@cache
def refusal(line: Line) -> str | None:
    try:
        config = config_of(line)
        check(config)
        return try_points([config])[0]
    except ConfigError as error:
        return str(error)


@pytest.fixture
def files(tmp_path, monkeypatch) -> None:
    """Two models and a table, which the lines name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path / "cache"))
    shape = composed("model=tiny").model.hf_config
    for name, changes in {"one": {}, "other": {"intermediate_size": 80}}.items():
        saved(name, "LlamaForCausalLM", LlamaConfig(**{**shape, **changes}))
    rows = "".join(f"a text of {number} words,{number % 2}\n" for number in range(40))
    Path("rows.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    for remembered in (config_of, refusal, seen_by_one_rank):  # they read the files
        remembered.cache_clear()


def test_a_new_key_has_a_witness_and_a_case():
    keys = [key for key in KEYS if key.startswith(OF_TRAINING)]
    assert set(keys) == WITNESSES.keys() == CASES.keys()
    for key in keys:
        where, what = WITNESSES[key]
        assert f"shows in: {where} ({what})" in help.about(key, CONF)


def test_deepspeed_takes_no_setting_of_our_engine_and_none_of_torch():
    """Where it is not installed too, for which each line is refused before."""
    for key in (*ENGINE_SETTINGS, "gradient_as_bucket_view"):
        changed = line_of("buffer", CASES[f"strategy.{key}"][0], changed=True)
        config = config_of((*changed, "strategy.implementation=deepspeed"))
        assert f"strategy.{key}" in [refused for refused, *_ in check_effects(config)]


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_every_key_takes_effect_under_one_engine_and_one_refuses_it(ranks):
    """Engines take turns of ten keys, which share the run without a change."""
    walk = Walk(ranks)
    for number, (key, rows) in enumerate(CASES.items()):
        turn = number // 10
        takers, refusers = takers_of(rows), refusers_of(rows)
        if takers:
            walk.take(key, *takers[turn % len(takers)])
        if refusers:
            walk.refuse(key, rows[-1], refusers[turn % len(refusers)])
    assert walk.problems == []


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(
            engine, marks=pytest.mark.slow if engine in ("buffer", "zero1") else pytest.mark.wide
        )
        for engine in ENGINES
    ],
)
def test_every_key_takes_effect_or_is_refused(ranks, engine):
    walk = Walk(ranks)
    for key, rows in CASES.items():
        for case in (case for case, taker in takers_of(rows) if taker == engine):
            walk.take(key, case, engine)
        if engine in refusers_of(rows):
            walk.refuse(key, rows[-1], engine)
    assert walk.problems == []
