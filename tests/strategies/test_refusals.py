"""What has no meaning is refused in one line: by the config before a rank starts, and by the library when it builds.

Command lines are in tests/wrong_lines.txt; here are the settings of strategies, optimizers and kinds together.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.composing import composed
from tests.oracle import Recipe, build_on_rank
from tests.strategies.engine import Ours
from zeroexp.check import check
from zeroexp.check.try_strategy import check_custom_layout_and_optimizer
from zeroexp.config.keys import ConfigError, OptimizerConfig
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process.world import fake_world
from zeroexp.zero.options import Dtypes, Options, OuterOptimizer

NODES = "cluster=slurm cluster.slurm.ranks_per_node=4 world_size=8 data.global_batch_size=8"
COPIES = "strategy.secondary_partition=4 data.micro_batch_size=1"
MUON, BY_PARAMETER = "optimizer=muon world_size=2", "strategy.implementation=parameter"
OF_VECTORS = "precision=bf16_master strategy=zero3 +optimizer.kinds.vectors.master=bfloat16"
ON_HOST = "world_size=2 strategy=zero2 strategy.offload=optimizer"
FP16 = "model=tiny precision=fp16_master world_size=2"
GROUPS = "world_size=4 data.global_batch_size=8 strategy=zero2 strategy.replicas=2"
CODES = "world_size=2 strategy.parameters.dtype=float8"
MASTERS = "world_size=2 strategy.parameters.dtype=master"

FLOAT32 = Dtypes(torch.float32, torch.float32, torch.float32)

LINES = {
    # offload
    f"{ON_HOST} strategy.offload=all": "rest whole stay on the device; use optimizer, or",
    f"{ON_HOST} optimizer=muon": "multiplies matrices, for which a host takes too long; leave it",
    "world_size=2 train.offload_activations=true train.compile=true": "use train.compile=false",
    (
        "world_size=2 train.offload_activations=true strategy=ddp strategy.implementation=torch "
        "precision=autocast"
    ): "saves casts of weights, which would be copied to the host too; use precision=bf16 or fp32",
    "world_size=2 train.offload_activations=true strategy.implementation=deepspeed": (
        "deepspeed gathers inside of blocks|not installed"
    ),
    # a secondary copy
    f"{NODES} {COPIES} strategy=zero2": "that rest whole are not gathered; use zero3",
    f"{NODES} {COPIES} strategy=zero3 strategy.implementation=torch": "FSDP2 has its own",
    f"{NODES} {COPIES} strategy=zero3 strategy.keep=all": "gathers each unit once a step; use keep",
    f"{NODES} {COPIES} strategy=zero3 strategy.offload=all": "puts on the host; use one of them",
    f"{NODES} {COPIES} strategy=zero3 cluster.slurm.ranks_per_node=3": "nodes of 2 ranks cut such",
    f"{NODES} strategy=zero3 strategy.replicas=2 strategy.secondary_partition=2": "4 ranks",
    (
        "cluster=slurm cluster.device=cpu cluster.slurm.ranks_per_node=4 world_size=12 strategy=zero3 "
        "strategy.replicas=2 strategy.secondary_partition=3 data.global_batch_size=12"
    ): "nodes of 4 ranks cut such groups; use 2$",
    "strategy=zero3 world_size=4 strategy.secondary_partition=2 data.global_batch_size=8": (
        "one node, which no gather leaves; use cluster=slurm or"
    ),
    # codecs, and codes at rest
    "world_size=2 strategy=zero2 strategy.error_feedback=true": "not rounded; set strategy.reduce_codec",
    "world_size=2 strategy=zero2 strategy.gather_codec=int8": "rest whole are not gathered; use zero3",
    "world_size=2 strategy=ddp strategy.reduce_codec=int8": "gradients are all-reduced; use zero1",
    f"{CODES} strategy=zero2": "rest whole are computed with as they rest; use zero3 on",
    f"{CODES} strategy=zero3 world_size=1": "rest whole are computed with as they rest",
    f"{CODES} strategy=zero3 strategy.gather_codec=int8": "send the codes of .* as they rest; leave",
    f"{CODES} strategy=zero3 strategy.offload=all": "rest on the device; use optimizer",
    f"{CODES} strategy=zero3 strategy.implementation=torch": "no effect with .*=torch",
    f"{MASTERS} strategy=zero3": "dtype=master: parameters are the masters anyway; use precision=bf16",
    f"{MASTERS} strategy=zero2 precision=bf16_master": "rest whole are computed with as they rest",
    f"{MASTERS} strategy=zero3 precision=bf16_master strategy.offload=optimizer": "masters from the host",
    f"{MASTERS} strategy=zero3 strategy.implementation=torch": "no effect with .*=torch",
    f"{CODES} strategy=zero3 model.lora.r=2": "have no master: .*; use strategy.gather_codec",
    # float16 with a loss scale
    f"{FP16} precision.reduce=bfloat16": "gradients.dtype=bfloat16: in float16 sums .* use precision=fp16_master",
    f"{FP16} strategy.optimizer.dtype=float16": "optimizer.dtype=float16: in .* let it set all dtypes",
    f"{FP16} strategy.reduce_codec=int8": r"strategy\.reduce_codec=int8: has no code for inf",
    f"{FP16} strategy.outer.every=1 strategy.replicas=2": r"outer\.every=1: replicas would",
    # Muon
    f"{MUON} strategy=zero3 strategy.implementation=torch": "use buffer",
    f"{MUON} strategy=zero3 strategy.matrix_step=owned": "use one of gather, alltoall",
    f"{MUON} strategy=ddp strategy.matrix_step=gather": "no matrix is cut",
    f"{MUON} {BY_PARAMETER} strategy.matrix_step=gather": "no matrix is cut",
    "world_size=2 strategy.matrix_step=gather": "no effect, optimizer.name=adamw needs no whole matrices; use",
    f"{MUON} {BY_PARAMETER} optimizer.settings.ns_steps=0": "use 1 to 99",
    f"{MUON} {BY_PARAMETER} optimizer.settings.adjust_lr=no": "match_rms_adamw",
    f"{MUON} {BY_PARAMETER} optimizer.settings.nesterov=maybe": "true or false",
    f"{MUON} {BY_PARAMETER} optimizer.momentum=0": "between 0 and 1",
    f"{MUON} {BY_PARAMETER} optimizer.momentum=1": "between 0 and 1",
    # masters, layouts and matrices of a kind
    f"{OF_VECTORS} strategy.offload=optimizer": "takes all master weights in one dtype",
    f"{OF_VECTORS} strategy.parameters.dtype=int8": "takes all master weights in one dtype",
    f"{OF_VECTORS} strategy.outer.every=2 strategy.replicas=2": "all master weights in one dtype",
    "world_size=2 strategy.implementation=torch +optimizer.kinds.vectors.layout=tensor": (
        "torch cuts all parameters alike; leave it out"
    ),
    "world_size=4 strategy=zero1 strategy.implementation=torch"
    " +optimizer.kinds.vectors.over=all": "shards the states of all parameters over the same ranks",
    f"{GROUPS} +optimizer.kinds.vectors.over=all strategy.outer.every=2": "use one of them",
    f"{GROUPS} +optimizer.kinds.vectors.over=group": "no effect, strategy.optimizer.over=group is",
    f"{GROUPS} +optimizer.kinds.vectors.over=all strategy.optimizer.over=all": "=all is for all",
    "strategy=zero3 strategy.implementation=torch +optimizer.kinds.matrices.name=muon"
    " +optimizer.kinds.matrices.momentum=0.9": "torch cuts the matrices",
}
ROWS = {
    "embedings={lr: 1e-4}": "did you mean embeddings",
    "vectors={lrr: 1e-4}": "did you mean lr",
    "vectors={name: adam}": "did you mean adamw",
    "vectors={name: sgd, eps: 1e-4}": "a row of optimizer.name=sgd reads no such key",
    "vectors={lr: 0}": "use more than 0",
    "vectors={lr: high}": "no number",
    "vectors={moments: int4}": "use one of bfloat16, int8",
    "vectors={name: sgd, moments: bfloat16}": "sgd keeps none",
    "vectors={betas: [0.9]}": "not two numbers",
    "vectors={betas: [low, high]}": "not two numbers",
    "vectors={name: [muon]}": "unknown word",
    # Of a row behind another, which is checked first.
    "embeddings={lr: 1e-4}, vectors={mometum: 0.9}": "reads no such key",
    "embeddings={lr: 1e-4}, vectors=5": "use some such as",
    "embeddings={lr: 1e-4}, vectors={settings: null}": "no such setting",
    "vectors={betas: [0.9, 0.999], moments: bfloat16}": "rounding takes back",
    "vectors={settings: {nesterov: true}}": "no such setting",
    "matrices={name: muon}": "Muon needs one between 0 and 1",
    "matrices={name: muon, momentum: 0.9, settings: {ns_steps: 0}}": "use 1 to 99",
    "vectors={name: muon, momentum: 0.9}": "no block of the model has a trainable matrix",
    "vectors=1": "use some such as",
    "vectors={layout: parametr}": "did you mean parameter",
    "vectors={master: bf16}": "use one of float32, bfloat16",
    "vectors={master: float32}": "master weights are float32 anyway",
    "vectors={master: bfloat16}": "parameters are float32; use precision=bf16_master",
    "vectors={over: every}": "use one of group, all",
    "vectors={over: all}": "optimizer.kinds.vectors.over=all: one group is all ranks; set",
    "experts={lr: 1e-4}": "no trainable parameter of the model is left for this row",
    "*.nothing={lr: 1e-4}": "no trainable parameter of the model is left for this row",
}


@pytest.mark.parametrize("words", LINES)
def test_the_config_refuses_in_a_line(words) -> None:
    with pytest.raises(ConfigError, match=LINES[words]):
        config = composed(*words.split())
        check(config)
        check_custom_layout_and_optimizer(config)


@pytest.mark.parametrize("row", ROWS)
def test_the_config_refuses_a_row_of_a_kind_in_a_line(row) -> None:
    with pytest.raises(ConfigError, match=ROWS[row]):
        config = composed(f"+optimizer.kinds={{{row.replace('=', ': ')}}}", "world_size=2")
        check(config)
        check_custom_layout_and_optimizer(config)


@pytest.mark.parametrize("row", ["gradients", "optimizer"])
def test_gradients_and_masters_do_not_rest_as_codes(row):
    with pytest.raises(ValueError, match=f"strategy.{row}.dtype=float8: unknown word"):
        check(composed("world_size=2", f"strategy.{row}.dtype=float8"))


def test_a_model_without_a_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match="no block of the model has a trainable matrix"):
        parameter_groups(nn.LayerNorm(3), OptimizerConfig(name="muon"), [])


NAN: Any = float("nan")
RESTING = {"gather_codec": "float8", "masters_rest": True}
# stage, ranks, options, a part of the line; most rules of cut/engine_rules.py stand in LINES alone
OPTIONS: list[tuple[str, int, dict[str, Any], str]] = [
    ("zero3", 2, {"layout": "rows"}, "options.layout=rows: use parameter"),
    ("zero3", 2, {"unit": "row"}, "options.unit=row: use model, block"),
    ("zero3", 2, {"keep": "first"}, "options.keep=first: use none"),
    ("zero3", 2, {"reduce_each": "epoch"}, "options.reduce_each=epoch: use microbatch"),
    ("zero3", 2, {"transport": "pigeon"}, "options.transport=pigeon: use"),
    ("zero3", 2, {"owners": "random"}, "options.owners=random: use"),
    ("zero3", 2, {"prefetch": -1}, "options.prefetch=-1: use 0 or more units, or None"),
    ("zero3", 2, {"prefetch": "all"}, "options.prefetch='all': use 0 or more"),
    ("zero3", 2, {"bucket_mb": 0}, "options.bucket_mb=0: use a size in MiB above 0"),
    ("zero3", 2, {"bucket_mb": -3.0}, "options.bucket_mb=-3.0: use a size"),
    ("zero3", 2, {"bucket_mb": NAN}, "options.bucket_mb=nan: use a size"),
    ("zero3", 2, {"bucket_mb": "4"}, "options.bucket_mb='4': use a size"),
    ("zero3", 2, {"overlap": "yes"}, "options.overlap='yes': use True or False"),
    # replicas, and the optimizer over all of them
    ("ddp", 4, {"replicas": 2}, "options.replicas=2: every rank is a replica already"),
    ("zero2", 4, {"replicas": 3}, "options.replicas=3: 4 ranks form no 3 equal groups; use 1, 2"),
    ("zero3", 4, {"replicas": 4}, "a group of one rank shards nothing: this is ddp; use fewer"),
    ("zero3", 4, {"replicas": 0}, "options.replicas=0: use a number of groups, 1 or more"),
    (
        *("zero3", 4, {"optimizer_over": "all", "replicas": 2, "outer": OuterOptimizer(2)}),
        "optimizer_over=all: with `outer` each replica updates all of its weights; use one",
    ),
    (
        *("zero3", 4, {"optimizer_over": "all", "replicas": 2, "offload": "all"}),
        "optimizer_over=all: pieces on the host are sent between no replicas; use",
    ),
    # outer steps
    ("zero3", 2, {"outer": OuterOptimizer(2)}, "nothing to join; set options.replicas=2 or more"),
    (
        "zero3",
        2,
        {"replicas": 2, "outer": OuterOptimizer(0)},
        "use OuterOptimizer(every=...) with 1 step or more",
    ),
    ("zero3", 2, {"replicas": 2, "outer": OuterOptimizer(2, lr=0.0)}, "use an lr above 0"),
    (
        "zero3",
        2,
        {"replicas": 2, "outer": OuterOptimizer(2, momentum=1.0)},
        "use a momentum of 0 up to 1",
    ),
    # a secondary copy
    (
        "zero3",
        8,
        {"secondary_partition": 3},
        "8 ranks form no equal nodes of it; use 2, 4, of which it must divide a node's ranks",
    ),
    ("zero3", 8, {"secondary_partition": 8}, "no gather leaves the 8 ranks that shard; leave"),
    ("zero3", 8, {"secondary_partition": 1}, "=1: use the number of ranks of a node, 2 or"),
    ("zero3", 8, {"secondary_partition": 4, "replicas": 2}, "the 4 ranks that shard; leave it"),
    ("zero3", 8, {"secondary_partition": 2, "transport": "direct"}, "copy saves nothing; use"),
    # what arrives in forward
    ("zero3", 2, {"publish": "forward"}, "use zero1 or zero2 with overlap"),
    ("ddp", 2, {"publish": "forward"}, "use zero1 or zero2 with overlap"),
    ("zero1", 2, {"publish": "forward", "overlap": False}, "use zero1 or zero2 with overlap"),
    # offload
    ("zero2", 2, {"offload": "cpu"}, "use optimizer, all, None"),
    ("zero2", 2, {"offload": "optimizer", "offload_fraction": 0}, "use a share above 0, up to 1"),
    ("zero2", 2, {"offload_fraction": 0.5}, "nothing is offloaded; set options.offload"),
    # codecs, and codes at rest
    ("zero3", 2, {"reduce_codec": "int3"}, "use int8, float8, int4, None"),
    ("zero3", 2, {"reduce_codec": "int4", "transport": "direct"}, "use auto"),
    ("zero3", 2, {"error_feedback": True}, "set options.reduce_codec, or leave"),
    ("zero2", 2, {"masters_rest": True}, "with as they rest; use zero3 on two ranks"),
    ("zero3", 2, {"masters_rest": True, "transport": "direct"}, "not cast on their way; use auto"),
    ("zero3", 2, {"masters_rest": True, "offload": "all"}, "masters from the host; leave it"),
    ("zero3", 2, {**RESTING, "offload": "all"}, "rest on the device; use optimizer"),
]


@pytest.mark.parametrize(("stage", "size", "options", "line"), OPTIONS)
def test_the_library_refuses_options_in_a_line(stage, size, options, line) -> None:
    with fake_world(0, size) as world, pytest.raises(ValueError) as error:
        build_on_rank(world, Recipe(), Ours(stage, Options(**options)))
    assert line in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("transport", ["direct", "gloo"])
def test_the_library_refuses_transports_of_cpus_for_a_gpu(transport) -> None:
    line = f"transport={transport}: it moves what lies on CPUs, and the model is for cuda:0; use a"
    with fake_world(0, 2, "cuda:0") as world, pytest.raises(ValueError, match=line):
        build_on_rank(world, Recipe(), Ours("zero3", Options(transport=transport)))


@pytest.mark.parametrize(
    ("over", "replicas", "line"),
    [
        ("every", 2, "param_groups: over=every: use group, all"),
        ("all", 1, "param_groups: over=all: one group is all ranks"),
    ],
)
def test_the_library_refuses_ranks_of_a_kind(over, replicas, line) -> None:
    recipe = Recipe(kinds=json.dumps({"vectors": {"over": over}}))
    with fake_world(0, 4) as world, pytest.raises(ValueError, match=line):
        build_on_rank(world, recipe, Ours("zero2", Options(replicas=replicas)))


@pytest.mark.parametrize("bound", [-1.0, NAN, "1.0"])
def test_the_library_refuses_a_bound_of_norms(bound) -> None:
    with fake_world(0, 2) as world, pytest.raises(ValueError, match=r"max_grad_norm=.*above 0"):
        build_on_rank(world, Recipe(max_grad_norm=bound), Ours("zero3", Options()))


@pytest.mark.parametrize(
    ("dtypes", "line"),
    [
        (torch.bfloat16, r"dtypes=torch.bfloat16: give Dtypes\(compute, reduce, master\)"),
        (replace(FLOAT32, compute="bf16"), "the dtype 'bf16' of 'compute': use one of"),
        (replace(FLOAT32, reduce=torch.int32), "torch.int32 of 'reduce'"),
        (replace(FLOAT32, of_modules={"head": "float32"}), "'float32' of 'head'"),
        (replace(FLOAT32, of_modules=["head"]), "give a dict of names and dtypes"),
    ],
)
def test_the_library_refuses_what_is_no_dtype(dtypes, line) -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": list(model.parameters())}]
    options = {"blocks": [], "stage": STAGES["zero3"], "optimizer_factory": torch.optim.SGD}
    with fake_world(0, 2) as world, pytest.raises(ValueError, match=line):
        Sharded(model, param_groups=groups, world=world, dtypes=dtypes, **options)


def test_the_library_refuses_muon_on_the_host() -> None:
    make = Ours("zero2", Options(offload="optimizer"))
    with fake_world(0, 2) as world, pytest.raises(ValueError, match="from host to host; leave it"):
        build_on_rank(world, Recipe(optimizer="muon"), make)
