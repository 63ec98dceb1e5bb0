"""Every mistake is told in one line with key, value and remedy, before a rank starts, and never as a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.composing import compose_once, composed, values_of
from tests.somebody_else import not_root, open_to_all, read_only
from zeroexp import __main__ as zeroexp
from zeroexp.check import rules_batch
from zeroexp.check.readable import check_inputs
from zeroexp.cluster.sweep import Sweep
from zeroexp.commandline.mistakes import explain
from zeroexp.config.keys import ConfigError
from zeroexp.models import find_weights
from zeroexp.process.writable import require_writable

# Command line -> parts of the one line it gets: key=value first, then what is wrong or what to do.
WRONG = {
    # words and keys that do not exist
    "strategy=zero4": ("strategy=zero4:", "use one of ddp, zero1"),
    "train.stepz=3": ("train.stepz=3:", "did you mean train.steps"),
    "stratgey=zero3": ("stratgey=zero3:", "did you mean strategy"),
    "model.hf_config.layers=3": ("model.hf_config.layers=3:", "use +model.hf_config.layers=3"),
    "strategy.implementation=bufer": ("strategy.implementation=bufer:", "did you mean buffer?"),
    # values of the wrong kind or size
    "train.steps=many": ("train.steps=many:", "use a whole number"),
    "train.activation_checkpointing=maybe": (
        "train.activation_checkpointing=maybe:",
        "use true or false",
    ),
    "train=3": ("train=3:", "set one of its keys"),
    "optimizer.lr=0": ("optimizer.lr=0", "use more than 0"),
    "optimizer.lr=fast": ("optimizer.lr=fast:", "use a number"),
    "optimizer.max_grad_norm=0": ("optimizer.max_grad_norm=0", "use more than 0"),
    "world_size=0": ("world_size=0:", "use 1 or more"),
    "data.path=/no/such/text": ("data.path=/no/such/text:", "use one that exists"),
    # right by themselves, without a meaning together
    "data.global_batch_size=12 world_size=5": ("data.global_batch_size=12:", "use 10 or 15"),
    "data.file=a.csv": ("data.file=a.csv: unknown key", "use data.path (with data=hf)"),
    "data.column=a": ("data.column=a: unknown key", "use data.text_column"),
    "data=hf": ("data.path=null:", "name a file"),
    # a sweep ends as a whole where one of its words is wrong
    "-m strategy=ddp,zero4": ("strategy=zero4:", "use one of"),
    "-m strategy.implementation=buffer,bufer": ("strategy.implementation=bufer:", "buffer?"),
    "-m world_size=2,0": ("world_size=0:", "use 1 or more"),
    # a typo beside swept words is told, not the commas
    "strategy=ddp,zero1 train.stepz=3": ("train.stepz=3:", "did you mean train.steps"),
    "-m world_size=1,2 optimzer.lr=3": ("optimzer.lr=3:", "use optimizer.lr"),
    "-m strategy=ddp,zero1 optimizer.lr=fast": ("optimizer.lr=fast:", "use a number"),
    "-m strategy=ddp,zero1 model=tinyy": ("model=tinyy:", "did you mean tiny?"),
    # words that Hydra, the file system or torch would answer with a traceback
    "-m train.steps=range(5,5)": ("no point to run:", "is empty"),
    "-m model=glob(zz*)": ("no point to run:", "is empty"),
    f"resume={'x' * 300}": ("resume=xxxx", "File name too long"),
    "model=null": ("model=null:", "use one of gpt2_tiny"),
    "strategy=null": ("strategy=null:", "use one of ddp"),
    "hydra.sweeper.max_batch_size=0": ("hydra.sweeper.max_batch_size=0:", "at least 1"),
    "--resolve": ("--resolve:", "--cfg job --resolve"),
    "--experimental-rerun x": ("--experimental-rerun:", "--rerun outputs/<sweep>"),
    "--shell-completion": ("--shell-completion:", "use one of install=bash"),
    "--nope": ("--nope:", "use one of"),
    "--cfg nope": ("--cfg nope:", "use one of job"),
    "study=compare,buckets": ("study=compare,buckets:", "one command for each"),
    # what other projects call it
    "lr=0.1": ("lr=0.1:", "use optimizer.lr"),
    "train.epochs=3": ("train.epochs=3:", "use train.steps"),
    "batch_size=8": ("batch_size=8:", "data.global_batch_size"),
    "gpus=2": ("gpus=2:", "use world_size"),
    # numbers that no comparison refuses, and settings that would do nothing
    "cluster=slurm cluster.slurm.partition=": ("cluster.slurm.partition=:", "or null"),
    "hydra.run.dir=elsewhere": ("hydra.run.dir=elsewhere:", "use outputs="),
    "hydra.sweep.dir=elsewhere": ("hydra.sweep.dir=elsewhere:", "use outputs="),
    "hydra.mode=RUN": ("hydra.mode=RUN:", "leave it out"),
    # numbers beyond what the system, torch or patience allow
    "cluster=slurm cluster.slurm.memory_gb=-3": ("cluster.slurm.memory_gb=-3.0:", "more than 0"),
    # models that can not be built
    "model.hf_config.hidden_size=63": ("model.hf_config of model.name=small:", "63"),
    "strategy=3": ("strategy=3:", "use one of ddp"),
    "-m model=tiny,3": ("model=tiny,3:", "use one of"),
    # a study whose every point is excluded
    "study=compare strategy=zero1_allreduce": ("study=compare:", "study.include"),
    # --rerun
    "--rerun": ("--rerun", "one folder"),
    "--rerun no/such/folder": ("--rerun", "outputs/<sweep>"),
}

# The same of what no part of Hydra judges: the words are put into a composed config, and handed to the sweep as Hydra
# does. WRONG has one of each kind too.
WRONG_VALUES = {
    # words and keys that do not exist
    "model=smal": ("model=smal:", "did you mean small?"),
    "study=comparison": ("study=comparison:", "compare"),
    "+train.stepz=3": ("train.stepz=3:", "unknown key"),
    "strategy.implementation=deepspeed": ("strategy.implementation=deepspeed:", "use torch"),
    "strategy.unit=layer": ("strategy.unit=layer:", "model, block, module"),
    "strategy.keep=first": ("strategy.keep=first:", "none, last, all"),
    "strategy.reduce_each=epoch": ("strategy.reduce_each=epoch:", "microbatch, step"),
    "strategy.parameters.placement=sharded": (
        "strategy.parameters.placement=sharded:",
        "did you mean shard?",
    ),
    "precision.compute=float8": ("precision.compute=float8:", "use one of float32, bfloat16"),
    "optimizer.schedule=cosin": ("optimizer.schedule=cosin:", "did you mean cosine?"),
    "cluster.device=gpu": ("cluster.device=gpu:", "use cuda"),
    "cluster.kind=pbs": ("cluster.kind=pbs:", "use one of local, slurm"),
    # values of the wrong kind or size
    "train.steps=-3": ("train.steps=-3:", "use at least 1"),
    "train.warmup_steps=-1": ("train.warmup_steps=-1:", "use at least 0"),
    "train.activation_checkpointing=true train.recompute_every=0": (
        "train.recompute_every=0:",
        "use at least 1",
    ),
    "train.recompute_every=2": ("train.recompute_every=2: no effect", "set it to true"),
    "train.recompute_except=[aten.mm]": ("train.recompute_except=", "set it to true"),
    "train.activation_checkpointing=true train.recompute_except=[aten.matmull]": (
        "train.recompute_except=aten.matmull: torch has no such operator",
        "name one as aten.mm",
    ),
    "train.activation_checkpointing=true train.recompute_except=[aten.t.default]": (
        "train.recompute_except=aten.t.default: returns a view",
        "name one that computes",
    ),
    "train.activation_checkpointing=true train.recompute_except=[aten.mm] strategy.unit=module": (
        "train.recompute_except=",
        "use strategy.unit=block",
    ),
    "optimizer.betas=[0.9]": ("optimizer.betas=[0.9]:", "use [0.9, 0.95]"),
    "world_size=two": ("world_size=two:", "use 1 or more"),
    "cluster.requeue=true": ("cluster.requeue=true:", "no effect on this machine"),
    "cluster=slurm cluster.device=cpu cluster.requeue=true": (
        "cluster.requeue=true:",
        "set checkpoint.every",
    ),
    "cluster=slurm cluster.device=cpu cluster.timeout_s=60 checkpoint.every=2": (
        "cluster.slurm.save_s=120:",
        "use at most 30",
    ),
    "cluster.world_sizes=[] world_size=all": ("cluster.world_sizes=[]:", "use [1, 2]"),
    "strategy=zero2 strategy.bucket_mb=0": ("strategy.bucket_mb=0", "use 0.001 to"),
    "strategy=zero2 strategy.bucket_mb=large": ("strategy.bucket_mb=large", "auto"),
    "strategy=zero2 strategy.bucket_mb=true": ("strategy.bucket_mb=", "auto"),
    "model.weights=./nowhere": ("model.weights=./nowhere:", "use one that exists"),
    "tracking.uri=file:./mlruns": ("tracking.uri=file:./mlruns ", "sqlite:///"),
    "strategy=[": ("strategy=[:", "write key=value"),
    "strategy": ("strategy:", "write key=value"),
    # right by themselves, without a meaning together
    "strategy=zero1_allreduce strategy.implementation=torch": (
        "strategy=zero1_allreduce:",
        "use zero1",
    ),
    "strategy=zero2 strategy.gradients.placement=partial": (
        "strategy=zero2:",
        "use strategy=zero1",
    ),
    "strategy.gradients.placement=replicate": ("strategy=zero3:", "use one of ddp"),
    "precision=autocast": ("precision=autocast:", "use precision=bf16_master"),
    "precision=bf16_master strategy=ddp strategy.implementation=torch": (
        "precision=bf16_master:",
        "use precision=autocast",
    ),
    "precision=bf16 strategy.implementation=torch": (
        "precision=bf16:",
        "use precision=bf16_master",
    ),
    "precision.master=bfloat16": ("precision.compute=float32:", "use precision=bf16_master"),
    "strategy.implementation=torch strategy.gradients.dtype=bfloat16": (
        "strategy.gradients.dtype=bfloat16:",
        "use the precision group",
    ),
    "data.global_batch_size=1": ("data.global_batch_size=1:", "use 2"),
    "model=mlp_1b": ("model=mlp_1b:", "use data=vectors"),
    "model=mlp_tiny data=synthetic": ("model=mlp_tiny:", "use data=vectors"),
    "data=vectors": ("data.task=regression:", "use data.task=causal"),
    "model=smollm2_360m_yelp": ("data.task=causal:", "use data.task=classification"),
    "data=yelp": ("data.task=classification:", "use data.task=causal"),
    "data.task=classification": ("data.task=classification:", "use causal"),
    "model.num_labels=5": ("model.num_labels=5:", "leave it null"),
    "data=yelp model.task=classification model.num_labels=1": (
        "model.num_labels=1: of one class the loss is 0",
        "use 2 or more",
    ),
    "data=yelp model.task=classification": ("model.num_labels=null:", "model.num_labels=5"),
    "data.seq_len=4096": ("data.seq_len=4096:", "use at most 2048"),
    "data.vocab_size=50000": ("data.vocab_size=50000:", "use 2048"),
    "data=synthetic data.vocab_size=4096": ("data.vocab_size=4096:", "larger vocabulary"),
    "model=hf +model.hf_config.model_type=llama data=synthetic": (
        "data.vocab_size=null: the model names no vocabulary",
        "set data.vocab_size=2048",
    ),
    "data.limit=10": ("data.limit=10:", "leave it null"),
    "data.text_column=body": ("data.text_column=body:", "leave it null"),
    "data=synthetic data.split=test": ("data.split=test:", "leave it null"),
    "data=csv": ("data=csv: unknown option", "use data=hf data.path=... with a csv file"),
    "data=imdb": ("data=imdb: unknown option", "use data=hf data.path=... with its id on the hub"),
    "data=yelp_causal data.labels=[1,2]": ("data.labels=[1, 2]:", "leave it null"),
    "data=yelp_causal data.label_column=stars": ("data.label_column=stars:", "leave it null"),
    "data=yelp model=smollm2_360m_yelp data.labels=[bad,good]": (
        "data.labels=['bad', 'good']:",
        "set model.num_labels=2",
    ),
    "data.validation_split=test": ("data.validation_split=test:", "set data.validation_samples"),
    "data=yelp_causal data.validation_split=train": (
        "data.validation_split=train:",
        "use another split",
    ),
    "train.validate_every=5": ("train.validate_every=5:", "set data.validation_samples=64"),
    "train.validate_every=0 data.validation_samples=5": ("train.validate_every=0:", "at least 1"),
    "data.validation_samples=0": ("data.validation_samples=0:", "at least 1"),
    "data=synthetic data.limit=10": ("data.limit=10:", "leave it null"),
    "data=synthetic data.path=.": ("data.path=.:", "leave it null"),
    "model=moe_tiny model.weights=me/moe": ("model.weights=me/moe:", "leave it null"),
    "model=moe_tiny strategy=zero2 strategy.implementation=torch": (
        "strategy.implementation=torch:",
        "ranks skip different experts",
    ),
    "model=moe_tiny strategy.implementation=torch data.seq_len=2": (
        "strategy.implementation=torch:",
        "use buffer, or model=mixtral_tiny",
    ),
    # explicit settings that the chosen path would ignore
    "strategy.owners=greedy": ("strategy.owners=greedy:", "leave it null"),
    "strategy=zero2 strategy.prefetch=2": ("strategy.prefetch=2:", "leave it null"),
    "strategy=ddp strategy.keep=all": ("strategy.keep=all:", "leave it null"),
    "strategy=ddp strategy.implementation=parameter strategy.owners=greedy": (
        "strategy.owners=greedy:",
        "shards nothing",
    ),
    "strategy.overlap=false strategy.prefetch=2": ("strategy.prefetch=2:", "leave it null"),
    "strategy.gradient_as_bucket_view=true": (
        "strategy.gradient_as_bucket_view=true:",
        "leave it null",
    ),
    "strategy=zero1 strategy.reduce_each=microbatch": (
        "strategy.reduce_each=microbatch:",
        "use step",
    ),
    "strategy.implementation=torch strategy.overlap=false": (
        "strategy.overlap=false:",
        "leave it null",
    ),
    "strategy=ddp strategy.implementation=torch strategy.unit=block": (
        "strategy.unit=block:",
        "leave it null",
    ),
    "optimizer.momentum=0.9": ("optimizer.momentum=0.9:", "use optimizer=sgd"),
    "tracking=files tracking.uri=sqlite:///x.db": ("tracking.uri=sqlite:///x.db:", "mlflow"),
    # words that Hydra, the file system or torch would answer with a traceback
    "world_size=[1,2]": ("world_size=[1, 2]:", "use 1 or more"),
    "study.name=a/b": ("study.name=a/b:", "use letters"),
    "study.name=..": ("study.name=..:", "use letters"),
    "study.name=": ("study.name=:", "use letters"),
    f"study.name={'x' * 300}": ("study.name=xxxx", "at most 100"),
    "outputs=": ("outputs=:", "use outputs=outputs"),
    "train.steps=???": ("train.steps=???:", "give it one"),
    # what other projects call it
    "strategy=fsdp": ("strategy=fsdp:", "use strategy=zero3 strategy.implementation=torch"),
    "strategy=hsdp": ("strategy=hsdp:", "no hybrid sharding"),
    "strategy=zero-3": ("strategy=zero-3:", "use zero3"),
    "strategy=ZeRO_1": ("strategy=ZeRO_1:", "use zero1"),
    "strategy.implementation=fsdp2": ("strategy.implementation=fsdp2:", "strategy=zero3"),
    "optimizer=adam": ("optimizer=adam:", "use optimizer=adamw"),
    "precision=fp16": ("precision=fp16:", "precision=bf16_master"),
    # numbers that no comparison refuses, and settings that would do nothing
    "optimizer.lr=nan": ("optimizer.lr=nan:", "use a finite one"),
    "optimizer.weight_decay=inf": ("optimizer.weight_decay=inf:", "use a finite one"),
    "repeats=0": ("repeats=0:", "use at least 1"),
    "repeats=101": ("repeats=101:", "use at most 100"),
    "study.must_equal=[optimiser]": ("study.must_equal=optimiser:", "did you mean optimizer?"),
    "study.must_equal=[[1]]": ("study.must_equal=[[1]]:", "use one such as [a,b]"),
    "model.freeze=[[1]]": ("model.freeze=[[1]]:", "use one such as [a,b]"),
    "study.must_equal=[data.seq]": ("data.seq:", "no such key"),
    "study.loss_agreement=nan": ("study.loss_agreement=nan:", "use a finite one"),
    "+model.published.hidden_size=3": (
        "model.published.hidden_size=3:",
        "set model.hf_config.hidden_size instead",
    ),
    "train.seed=4294967296": ("train.seed=4294967296:", "use at most 4294967295"),
    "model.published=???": ("model.published=???:", "give it one"),
    "+model.hf_config.rms_norm_eps=nan": ("model.hf_config.rms_norm_eps=nan:", "finite"),
    "cluster.dry_run=true": ("cluster.dry_run=true:", "use cluster=slurm"),
    "cluster.wait=false": ("cluster.wait=false:", "use cluster=slurm"),
    "optimizer.warmup_steps=1000": ("optimizer.warmup_steps=1000:", "use at most 23"),
    "cluster.slurm.partition=gpu": ("cluster.slurm.partition=gpu:", "use cluster=slurm"),
    "cluster=slurm cluster.slurm.account=../x": ("cluster.slurm.account=../x:", "the site's"),
    "cluster=slurm cluster.slurm.constraint=$HOME": ("cluster.slurm.constraint=$HOME:", "null"),
    "cluster=slurm +cluster.slurm.sbatch.a={b:1}": ("cluster.slurm.sbatch.a=", "reservation=mine"),
    "cluster.slurm.setup=[ls]": ("cluster.slurm.setup=", "no effect"),
    "cluster.heartbeat_s=5": ("cluster.heartbeat_s=5:", "use cluster=slurm"),
    "cluster.force=true": ("cluster.force=true:", "use cluster=slurm"),
    "cluster.rehearse_s=5": ("cluster.rehearse_s=5:", "use cluster=slurm"),
    "optimizer=sgd optimizer.betas=[0.8,0.9]": ("optimizer.betas=[0.8, 0.9]:", "optimizer=adamw"),
    "optimizer=sgd optimizer.eps=1e-6": ("optimizer.eps=1e-06:", "use optimizer=adamw"),
    "optimizer.min_lr_ratio=0.5": ("optimizer.min_lr_ratio=0.5:", "schedule=cosine"),
    "optimizer.weight_decay=0 optimizer.decay_norms_and_biases=true": (
        "optimizer.decay_norms_and_biases=true:",
        "set optimizer.weight_decay",
    ),
    "train.profile_ranks=[0]": ("train.profile_ranks=[0]:", "set train.profile_steps"),
    "checkpoint.keep=5": ("checkpoint.keep=5:", "set checkpoint.every"),
    "tracking=files tracking.experiment=mine": ("tracking.experiment=mine:", "tracking=mlflow"),
    "+model.mlp.width=64": ("model.mlp.width=64:", "model.family=llama reads model.hf_config"),
    "+model.moe.top_k=2": ("model.moe.top_k=2:", "choose another model"),
    "model=mlp_tiny data=vectors +model.hf_config.hidden_size=3": (
        "model.hf_config.hidden_size=3:",
        "reads model.mlp",
    ),
    "+model.hf_config.attention_dropout=0.1": ("model.hf_config.attention_dropout=0.1:", "leave"),
    "+model.hf_config.use_cache=false": ("model.hf_config.use_cache=False:", "leave it out"),
    "+model.hf_config.torch_dtype=bfloat16": ("model.hf_config.torch_dtype=", "set precision"),
    "outputs='~/runs'": ("outputs=~/runs:", "use outputs=$HOME/"),
    "outputs=~/runs": ("outputs=~/runs:", "in quotes"),
    # numbers beyond what the system, torch or patience allow
    "cluster.threads_per_rank=99999999": ("cluster.threads_per_rank=99999999:", "at most 1024"),
    "tracking.system_s=0.01": ("tracking.system_s=0.01:", "at least 0.1"),
    "cluster.timeout_s=100000000000000000000": ("cluster.timeout_s=1000", "use at most 31622400"),
    "strategy.prefetch=1000000": ("strategy.prefetch=1000000:", "at most 1024"),
    "strategy.bucket_mb=1e-9": ("strategy.bucket_mb=1e-09:", "use 0.001"),
    "train.seed=99999999999999999999": ("train.seed=", "use at most 4294967295"),
    "world_size=2048 data.global_batch_size=2048": ("world_size=2048:", "use at most 1024"),
    "world_size=100000000": ("world_size=100000000:", "use at most 16777216"),
    "model.hf_config.num_hidden_layers=100000": (
        "model.hf_config.num_hidden_layers=100000:",
        "use at most 1000",
    ),
    "model.hf_config.hidden_size=99999999999": ("model.hf_config.hidden_size=", "too large"),
    # models that can not be built
    "model.hf_config.hidden_size=many": ("model.hf_config of model.name=small:", "hidden_size"),
    "model.hf_config.num_attention_heads=0": ("model.hf_config of model.name=small:", ""),
    "model.hf_config.num_hidden_layers=0": ("model.hf_config.num_hidden_layers=0:", "above 0"),
    "+model.hf_config.rms_norm_eps=tiny": ("model.hf_config of model.name=small:", "rms_norm_eps"),
    "model.hf_config.num_key_value_heads=3": ("model.hf_config.num_key_value_heads=3:", "divide"),
    "model.hf_config.num_attention_heads=512": ("model.hf_config.num_attention_heads=512:", ""),
    "model.hf_config.intermediate_size=0": ("model.hf_config.intermediate_size=0:", "above 0"),
    "+model.hf_config.pad_token_id=-1": ("model.hf_config.pad_token_id=-1:", "no word"),
    "model=mixtral_tiny model.hf_config.intermediate_size=69": (
        "model.hf_config.intermediate_size=69:",
        "use a multiple of 4, 16 bytes of float32",
    ),
    "model=mixtral_tiny model.hf_config.hidden_size=72 model.hf_config.intermediate_size=68 precision=bf16": (
        "model.hf_config.intermediate_size=68:",
        "use a multiple of 8",
    ),
    "model=mixtral_tiny model.hf_config.num_experts_per_tok=9": (
        "model.hf_config.num_experts_per_tok=9:",
        "at most",
    ),
    "model.hf_config.max_position_embeddings=many": ("model.hf_config", "max_position"),
    "+model.hf_config.layers=3": ("model.hf_config.layers:", "has no such key"),
    "model=mlp_tiny data=vectors model.mlp.width=wide": ("model.mlp.width=wide:", "above 0"),
    "model=mlp_tiny data=vectors model.mlp.depth=0": ("model.mlp.depth=0:", "above 0"),
    "model=moe_tiny model.moe.top_k=5": ("model.moe.top_k=5:", "there are 4 experts"),
    "model=moe_tiny model.moe.num_heads=3": ("model.moe.num_heads=3:", "use one that does"),
    "model=moe_tiny model.moe.num_experts=0": ("model.moe.num_experts=0:", "above 0"),
    "model=moe_tiny +model.moe.experts=3": ("model.moe.experts:", "no such key"),
}


@pytest.fixture(autouse=True)
def sooner(monkeypatch):
    """The last test is a whole process, in which Hydra does all that it does."""
    compose_once(monkeypatch)


@pytest.mark.parametrize("line", WRONG)
def test_mistake_is_one_line_and_nothing_runs(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zeroexp", *line.split()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert zeroexp.main() == zeroexp.REFUSED
    captured = capsys.readouterr()
    told = captured.err.splitlines()
    assert len(told) == 1 and captured.out == ""
    for part in WRONG[line]:
        assert part in told[0]
    assert told[0].startswith(f"zeroexp: {WRONG[line][0]}")
    assert not list(tmp_path.glob("**/state.json")), "a run folder was made"


@pytest.mark.parametrize("line", WRONG_VALUES)
def test_a_wrong_value_is_one_line_and_nothing_runs(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = line.split()
    with Sweep([]) as sweep, pytest.raises(zeroexp.MISTAKES) as caught:
        sweep.run([(words, values_of(*words), {})])
    told = explain(caught.value)
    assert "\n" not in told and told.startswith(WRONG_VALUES[line][0])
    for part in WRONG_VALUES[line]:
        assert part in told
    assert not list(tmp_path.glob("**/state.json")), "a run folder was made"


@pytest.mark.parametrize("shown", ["job", "all"])
def test_no_password_is_printed(shown, tmp_path, monkeypatch, capsys):
    """One in a word is refused; a file of the user and the environment may hold one too."""
    (tmp_path / "tracking").mkdir()
    text = "mlflow: true\nuri: postgresql://me:hunter2@host/db\nname: ${oc.env:SECRET_STORE}\n"
    (tmp_path / "tracking" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET_STORE", "http://host?token=hunter2")
    line = ["--config-dir", str(tmp_path), "tracking=mine", "--cfg", shown, "--resolve"]
    monkeypatch.setattr(sys, "argv", ["zeroexp", *line])
    assert zeroexp.main() == 0
    printed = capsys.readouterr()
    assert "uri: postgresql://me@host/db" in printed.out
    assert "hunter2" not in printed.out + printed.err


# As above, where the folder of the test holds an empty one and a text.
UNREADABLE = {
    "data.path=empty": ("data.path=empty:", "no file in it ends in .txt; add"),
    "data=yelp_causal data.path=empty": ("data.path=empty:", "ends in .csv"),
    "data=yelp_causal data.path=absent.csv": ("data.path=absent.csv:", "use one that exists"),
    "data.validation_samples=100000": ("data.validation_samples=100000:", "use fewer"),
    "data=hf data.path=rows.csv": ("data.text_column=text:", "use one of body, stars"),
    "data=hf data.path=rows.csv data.text_column=stars": (
        "data.text_column=stars:",
        "use one of body",
    ),
    "data=hf data.path=rows.csv data.text_column=body data.validation_split=test data.seq_len=1": (
        "data.path=rows.csv:",
        "cut it in two with data.split=train[:90%]",
    ),
    "data=hf data.path=rows": ("data.path=rows: no file for the split train among dev.csv", "name"),
    "model.weights=./empty": ("model.weights=./empty:", "use a folder that holds"),
    "data=yelp_causal data.path=me/reviews": ("data.path=me/reviews:", "fetch it first"),
    "model.weights=me/model": ("model.weights=me/model:", "fetch it first"),
}


@pytest.mark.parametrize("line", UNREADABLE)
def test_what_ranks_could_not_read_is_refused(line, tmp_path, offline, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "rows.csv").write_text("body,stars\nfine,3\n")
    (tmp_path / "rows").mkdir()
    for name in ("dev.csv", "test.csv"):
        (tmp_path / "rows" / name).write_text("text\nfine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zeroexp", *line.split()])
    assert zeroexp.main() == zeroexp.REFUSED
    (told,) = capsys.readouterr().err.splitlines()
    begins, remedy = UNREADABLE[line]
    assert told.startswith(f"zeroexp: {begins}") and remedy in told
    assert not list(tmp_path.glob("**/state.json")), "a run folder was made"


@pytest.mark.parametrize(
    ("key", "shut"),
    [
        ("data.path", "folder"),
        ("data.path", "folder/text.txt"),
        ("model.weights", "folder"),
        ("model.weights", "folder/model.safetensors"),
    ],
)
def test_what_others_alone_may_read_is_refused(key, shut):
    with open_to_all() as home:
        folder = home / "folder"
        folder.mkdir()
        for file in ("model.safetensors", "text.txt"):
            (folder / file).write_text("text")
        (home / shut).chmod(0)
        config = composed(f"{key}={folder}")
        with not_root(), pytest.raises(ConfigError) as told:
            check_inputs(config)
        (home / shut).chmod(0o755)
        check_inputs(config)
    assert str(told.value).startswith(f"{key}={folder}: can not be read (Permission denied: ")
    assert str(told.value).endswith("; make it readable, or choose another")


# As above, where a file of that name is in the way, or the folder is on a disk that is full.
UNWRITABLE = {
    "outputs=text.txt": ("outputs=text.txt:", "(File exists: text.txt); choose a folder"),
    "outputs=text.txt/mine": ("outputs=text.txt/mine:", "Not a directory"),
    "-m outputs=text.txt,fine": ("outputs=text.txt:", "File exists"),
    "outputs=/proc/mine": ("outputs=/proc/mine:", "choose a folder"),
    "outputs=link": ("outputs=link:", "a link to /no/such/disk, which is not there"),
    "outputs=/dev/full": ("outputs=/dev/full:", "choose a folder"),
}


@pytest.mark.parametrize("line", UNWRITABLE)
def test_a_folder_that_takes_no_results_is_refused(line, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "link").symlink_to("/no/such/disk")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zeroexp", *line.split()])
    assert zeroexp.main() == zeroexp.REFUSED
    (told,) = capsys.readouterr().err.splitlines()
    begins, remedy = UNWRITABLE[line]
    assert told.startswith(f"zeroexp: {begins}") and remedy in told
    assert not list(tmp_path.glob("**/state.json")), "a run folder was made"


@pytest.fixture
def theirs() -> Iterator[Path]:
    with open_to_all() as home:
        folder = home / "theirs"
        folder.mkdir()
        with read_only(folder):
            yield folder


def test_a_folder_of_somebody_else_takes_no_results(theirs):
    """Asked for in the middle, since who is not root may not enter the folder this repository lies in."""
    with not_root(), pytest.raises(ConfigError) as caught:
        require_writable(f"outputs={theirs}", theirs, "choose another")
    told = f"outputs={theirs}: no folder that can be written (Permission denied"
    assert str(caught.value).startswith(told) and str(caught.value).endswith("; choose another")


def test_a_sweep_of_somebody_else_can_not_be_run_again_in_place(theirs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zeroexp", "--rerun", str(theirs)])
    with not_root():
        assert zeroexp.main() == zeroexp.REFUSED
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"zeroexp: --rerun {theirs}: no folder that can be written (Permission")


@pytest.mark.parametrize("line", ["data.path=/on/the/nodes", "model.weights=me/model"])
def test_what_only_the_nodes_of_slurm_may_see_is_not_judged_here(line, offline):
    config = composed("cluster=slurm", line)
    check_inputs(config)
    with pytest.raises(ConfigError):
        check_inputs(replace(config, cluster=composed().cluster))


@pytest.mark.parametrize(
    "line", ["model.weights=me/model", "data=yelp_causal data.path=me/reviews"]
)
def test_nodes_as_offline_as_we_are_judged_here(line, offline, monkeypatch):
    """Jobs inherit HF_HUB_OFFLINE, unless the site's setup may change it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["cluster=slurm", *line.split()]
    with pytest.raises(ConfigError, match=r"=me/.*: .*the hub can not be reached; "):
        check_inputs(composed(*words))
    check_inputs(composed(*words, "cluster.slurm.setup=['unset HF_HUB_OFFLINE']"))


def test_what_was_fetched_before_needs_no_network(offline, tmp_path):
    for folder in ("hub/datasets--me--one", "datasets/me___two", "cache/packed"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "cache" / "packed" / "about.json").write_text('{"hub_id": "me/three"}')
    for name in ("one", "two", "three"):
        check_inputs(composed("data=yelp_causal", f"data.path=me/{name}"))


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, and none of this machine's caches."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path / "cache"))
    find_weights.is_online.cache_clear()
    yield
    find_weights.is_online.cache_clear()


def test_cuda_on_a_machine_without(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(sys, "argv", ["zeroexp", "cluster.device=cuda"])
    rules_batch.num_gpus.cache_clear()
    try:
        assert zeroexp.main() == zeroexp.REFUSED
    finally:
        rules_batch.num_gpus.cache_clear()
    line = (
        "zeroexp: cluster.device=cuda: 1 GPUs here for world_size=2; use cluster.device=auto or cpu"
    )
    assert capsys.readouterr().err.strip() == line


def test_mistake_in_a_file_of_the_user(tmp_path, monkeypatch, capsys):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "mine.yaml").write_text("# @package _global_\ntrain: {stepz: 3}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zeroexp", "--config-dir", str(tmp_path), "study=mine"])
    assert zeroexp.main() == zeroexp.REFUSED
    (told,) = capsys.readouterr().err.splitlines()
    assert "train.stepz" in told and "study/mine" in told


def test_from_the_outside_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "zeroexp", "strategy=zero3", "-m", "world_size=1,0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("zeroexp: world_size=0: ") and done.stderr.count("\n") == 1
