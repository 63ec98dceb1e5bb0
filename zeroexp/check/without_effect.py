"""Settings that the chosen path would ignore are refused. A key counts as set where it differs from its default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from zeroexp.check.refusal import Refusal, value_of
from zeroexp.config import plugins
from zeroexp.config.data_sources import DATA
from zeroexp.config.engines import ENGINES
from zeroexp.config.families import MODELS
from zeroexp.config.keys import (
    ENGINE_SETTINGS,
    KEYS,
    TORCH_DDP,
    Config,
    LoraKeys,
    OuterKeys,
    SlurmConfig,
    default_of,
)
from zeroexp.config.optimizer import OPTIMIZERS, layouts_of, rows_of
from zeroexp.cut.layout import LAYOUTS

OF_TABLES = ("subset", "split", "text_column", "label_column", "labels", "limit")
OF_SLURM = (
    *("dry_run", "wait", "heartbeat_s", "force"),
    *(f"slurm.{field.name}" for field in fields(SlurmConfig)),
)

# A key, why it has no effect, and what gives it one; without that, "leave it null" is all one can do.
Idle = tuple[str, str, str | None]


def check_effects(config: Config) -> Iterator[Refusal]:
    for rows in (_of_model_and_data, _of_native_engines, _of_our_engine, _of_a_run):
        for key, why, remedy in rows(config):
            if value_of(config, key) == default_of(KEYS[key]):
                continue
            if remedy is None:
                yield key, f"no effect, {why}", "leave it null"
            else:
                yield key, f"no effect with {why}", f"{remedy}, or leave it out"


def _of_model_and_data(config: Config) -> Iterator[Idle]:
    model, data = config.model, config.data
    family, kind = MODELS[model.family], DATA[data.kind]
    if not family.of_transformers:
        yield "model.weights", f"model.family={model.family} starts from train.seed", None
    if model.task != "classification":
        yield "model.num_labels", f"model.task={model.task} has no labels", None
    if data.task != "classification":
        for key in ("data.label_column", "data.labels"):
            yield key, f"data.task={data.task} reads no labels", None
    if model.lora.r is None:
        for each in fields(LoraKeys):
            yield f"model.lora.{each.name}", "no adapters", "set model.lora.r"
    if data.task == "regression":
        yield "data.vocab_size", "vectors have no words", None
    if not kind.suffixes:
        yield "data.path", f"{data.kind} data has no files", None
    if not kind.is_table:
        why = f"data.kind={data.kind} has no splits; set data.validation_samples"
        yield "data.validation_split", why, None
        for key in OF_TABLES:
            yield f"data.{key}", f"data.kind={data.kind} reads no table", None


def _of_native_engines(config: Config) -> Iterator[Idle]:
    strategy, name = config.strategy, config.strategy.implementation
    keys = ENGINES[name].keys if name in ENGINES else ()
    is_torch, is_ddp = name == "torch", strategy.name in TORCH_DDP
    if "gradient_as_bucket_view" not in keys or (is_torch and not is_ddp):
        why = "only torch's DistributedDataParallel has it (ddp, zero1)"
        yield "strategy.gradient_as_bucket_view", why, None
    if name in ENGINES:
        for key in (key for key in ENGINE_SETTINGS if key not in keys):
            yield f"strategy.{key}", f"{name}'s engines do not have it", None
        for each in fields(OuterKeys):
            yield f"strategy.outer.{each.name}", f"{name}'s engines do not have it", None
        yield "strategy.optimizer.over", f"{name}'s engines", "use strategy.implementation=buffer"
    if is_torch and (is_ddp or strategy.unit != "block"):
        yield "strategy.unit", "torch's FSDP2 wraps blocks, its DDP the model", None


def _of_our_engine(config: Config) -> Iterator[Idle]:
    strategy = config.strategy
    if strategy.implementation not in LAYOUTS:
        return
    if strategy.outer.every is None:
        for key in ("lr", "momentum"):
            yield f"strategy.outer.{key}", "strategy.outer.every=null", "set strategy.outer.every"
    layouts = layouts_of(config)
    cuts = not all(layout.has_owners for layout in layouts)
    if not any(layout.has_owners for layout in layouts):
        why = f"{strategy.implementation} cuts evenly, nothing has an owner"
        yield "strategy.owners", why, None
    if strategy.optimizer.placement != "shard":
        yield "strategy.owners", f"strategy={strategy.name} shards nothing", None
    steps_matrices = any(
        OPTIMIZERS[own.name].whole_matrices for own in rows_of(config.optimizer).values()
    )
    if not steps_matrices:
        why = f"optimizer.name={config.optimizer.name} needs no whole matrices"
        yield "strategy.matrix_step", why, "use optimizer=muon"
    elif not cuts or strategy.optimizer.placement != "shard":
        yield "strategy.matrix_step", "no matrix is cut", None
    if strategy.parameters.placement != "shard":
        for key in ("strategy.prefetch", "strategy.keep", "strategy.gather_codec"):
            yield key, f"strategy={strategy.name} never gathers parameters", None
    if strategy.offload == "all" and strategy.parameters.placement != "shard":
        why = f"strategy={strategy.name}, whose parameters rest whole"
        yield "strategy.offload", why, "use optimizer"
    if strategy.offload is None:
        for key in ("offload_fraction", "offload_folder"):
            yield f"strategy.{key}", "strategy.offload=null", "set strategy.offload"
    if strategy.gradients.placement == "replicate":
        yield "strategy.reduce_codec", f"strategy={strategy.name} all-reduces gradients", None
    if strategy.reduce_codec is None:
        why, remedy = "gradients that are not rounded", "set strategy.reduce_codec"
        yield "strategy.error_feedback", why, remedy
    if strategy.overlap is False and strategy.prefetch:
        yield "strategy.prefetch", "nothing is gathered ahead without overlap", None


def _of_a_run(config: Config) -> Iterator[Idle]:
    chosen, train = config.optimizer, config.train
    for name in OPTIMIZERS.own:
        for key in sorted(set(OPTIMIZERS[name].keys) - set(OPTIMIZERS[chosen.name].keys)):
            yield f"optimizer.{key}", f"optimizer.name={chosen.name}", f"use optimizer={name}"
    if chosen.schedule == "constant":
        remedy = "use optimizer.schedule=cosine or linear"
        yield "optimizer.min_lr_ratio", "optimizer.schedule=constant", remedy
    if chosen.weight_decay == 0:
        key, why = "optimizer.decay_norms_and_biases", "optimizer.weight_decay=0"
        yield key, why, "set optimizer.weight_decay"
    if config.checkpoint.every is None:
        yield "checkpoint.keep", "checkpoint.every=null", "set checkpoint.every"
    if not train.activation_checkpointing:
        for key in ("train.recompute_every", "train.recompute_except"):
            yield key, "train.activation_checkpointing=false", "set it to true"
    if not train.profile_steps:
        yield "train.profile_ranks", "train.profile_steps=[]", "set train.profile_steps"
    if not config.tracking.mlflow:
        for key in ("tracking.uri", "tracking.experiment"):
            yield key, "tracking.mlflow=false", "use tracking=mlflow"
    if config.cluster.device == "cpu":
        for key in ("cluster.gpu", "cluster.network"):
            yield key, "cluster.device=cpu", "use cluster.device=cuda"
    if config.cluster.device_memory_gib is None and config.cluster.gpu is None:
        remedy = "set cluster.device_memory_gib"
        yield "cluster.reserved_gib", "cluster.device_memory_gib=null", remedy
    if config.cluster.link is None:
        yield "cluster.nodes", "cluster.link=null", "set cluster.link"
    if config.cluster.kind == "slurm":
        yield "cluster.link", "cluster=slurm, whose nodes have links", "use cluster=local"
    if config.cluster.kind != "slurm":
        for key in OF_SLURM:
            yield f"cluster.{key}", "ranks run on this machine", "use cluster=slurm"


def check_model_shape(config: Config) -> Iterator[Refusal]:
    """Allow keys of a model's shape only where its family reads them."""
    family = config.model.family
    read = MODELS[family].shape
    for name in ("hf_config", "mlp", "moe", "settings"):
        if name != read and (given := getattr(config.model, name)):
            problem = f"no effect, model.family={family} reads model.{read}"
            remedy = f"set model.{read}.*, or choose another model"
            yield f"model.{name}.{next(iter(given))}", problem, remedy


RULES = (plugins.check_settings, check_model_shape, check_effects)
