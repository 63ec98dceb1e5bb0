"""Settings that the chosen path would ignore are refused. A key counts as set where it differs from its default."""

from __future__ import annotations

from collections.abc import Iterator

from zeroexp.check.refusal import Refusal, as_typed, value_of
from zeroexp.config.data_kinds import DATA
from zeroexp.config.engines import ENGINES
from zeroexp.config.families import MODELS
from zeroexp.config.keys import ENGINE_SETTINGS, KEYS, TORCH_DDP, Config, default_of
from zeroexp.config.optimizer import OPTIMIZERS, layouts_of, rows_of
from zeroexp.config.plugins import WITH_SETTINGS, settings_of_word
from zeroexp.cut.layout import LAYOUTS
from zeroexp.registry.did_you_mean import suggest_nearest

# A key, or all keys of a group -> the key without which they have no effect.
NEEDS = {
    "model.lora": "model.lora.r",
    "strategy.outer": "strategy.outer.every",
    "optimizer.decay_norms_and_biases": "optimizer.weight_decay",
    "checkpoint.keep": "checkpoint.every",
    "train.recompute_every": "train.activation_checkpointing",
    "train.recompute_except": "train.activation_checkpointing",
    "train.profile_ranks": "train.profile_steps",
    "tracking.uri": "tracking.mlflow",
    "tracking.experiment": "tracking.mlflow",
    "cluster.nodes": "cluster.link",
}
OF_TABLES = "data.subset data.split data.text_column data.label_column data.labels data.limit"
OF_SLURM = (
    "cluster.dry_run cluster.wait cluster.heartbeat_s cluster.start_s cluster.force cluster.slurm"
)

# Keys, or groups of keys, that have no effect; why; and what gives them one, or "" for nothing.
Idle = tuple[str, str, str]


def check_settings_of_word(config: Config) -> Iterator[Refusal]:
    """Allow below `settings` of a group only what its word has."""
    for group, key in WITH_SETTINGS.items():
        section = getattr(config, group)
        word = getattr(section, key)
        defaults = settings_of_word(f"{group}.{key}", word)
        for given in (given for given in section.settings if given not in defaults):
            problem = f"{group}.{key}={word} has no such setting"
            remedy = suggest_nearest(given, defaults) if defaults else "leave it out"
            yield f"{group}.settings.{given}", problem, remedy


def check_model_shape(config: Config) -> Iterator[Refusal]:
    """Allow keys of a model's shape only where its family reads them."""
    family = config.model.family
    read = MODELS[family].shape
    for name in ("hf_config", "mlp", "moe", "settings"):
        if name != read and (given := getattr(config.model, name)):
            problem = f"no effect, model.family={family} reads model.{read}"
            remedy = f"set model.{read}.*, or choose another model"
            yield f"model.{name}.{next(iter(given))}", problem, remedy


def check_effects(config: Config) -> Iterator[Refusal]:
    rules = (_of_model_and_data, _of_native_engines, _of_our_engine, _of_a_run, _of_needs)
    for named, why, remedy in (row for rule in rules for row in rule(config)):
        for key in _keys_of(named.split()):
            if value_of(config, key) != (default := default_of(KEYS[key])):
                leave = "leave it null" if default is None else "leave it out"
                yield key, f"no effect, {why}", f"{remedy}, or {leave}" if remedy else leave


def _keys_of(names: list[str]) -> list[str]:
    return [key for name in names for key in KEYS if key == name or key.startswith(f"{name}.")]


def _of_model_and_data(config: Config) -> Iterator[Idle]:
    model, data = config.model, config.data
    family, kind = MODELS[model.family], DATA[data.kind]
    if not family.of_transformers:
        yield "model.weights", f"model.family={model.family} starts from train.seed", ""
    if model.family != "hf":
        why = f"model={model.name} reads no published config"
        remedy = "use model=hf, in a sweep of models a YAML of your own (docs/models.md)"
        yield "model.path model.init model.blocks", why, remedy
    if model.task != "classification":
        yield "model.num_labels", f"model.task={model.task} has no labels", ""
    if data.task != "classification":
        yield "data.label_column data.labels", f"data.task={data.task} reads no labels", ""
    if data.task == "regression":
        yield "data.vocab_size", "vectors have no words", ""
    if not kind.suffixes:
        yield "data.path", f"{data.kind} data has no files", ""
    if not kind.is_table:
        why = f"data.kind={data.kind} has no splits"
        yield "data.validation_split", why, "set data.validation_samples"
        yield OF_TABLES, f"data.kind={data.kind} reads no table", ""


def _of_native_engines(config: Config) -> Iterator[Idle]:
    strategy, name = config.strategy, config.strategy.implementation
    keys = ENGINES[name].keys if name in ENGINES else ()
    is_torch, is_ddp = name == "torch", strategy.name in TORCH_DDP
    if "gradient_as_bucket_view" not in keys or (is_torch and not is_ddp):
        why = "only torch's DistributedDataParallel has it (ddp, zero1)"
        yield "strategy.gradient_as_bucket_view", why, ""
    if name in ENGINES:
        unread = [f"strategy.{key}" for key in ENGINE_SETTINGS if key not in keys]
        why, remedy = f"{name}'s engines do not have it", "use strategy.implementation=buffer"
        yield " ".join([*unread, "strategy.outer strategy.optimizer.over"]), why, remedy
    if is_torch and (is_ddp or strategy.unit not in ("block", "layer")):
        yield "strategy.unit", "torch's FSDP2 wraps blocks or layers, its DDP the model", ""


def _of_our_engine(config: Config) -> Iterator[Idle]:
    strategy, optimizer = config.strategy, config.optimizer
    if strategy.implementation not in LAYOUTS:
        return
    named, shards = f"strategy={strategy.name}", strategy.optimizer.placement == "shard"
    has_owners = [layout.has_owners for layout in layouts_of(config)]
    if not any(has_owners):
        why = f"{strategy.implementation} cuts evenly, nothing has an owner"
        yield "strategy.owners", why, ""
    if not shards:
        yield "strategy.owners", f"{named} shards nothing", ""
    if not any(OPTIMIZERS[own.name].whole_matrices for own in rows_of(optimizer).values()):
        why = f"optimizer.name={optimizer.name} needs no whole matrices"
        yield "strategy.matrix_step", why, "use optimizer=muon"
    if all(has_owners) or not shards:
        yield "strategy.matrix_step", "no matrix is cut", ""
    if strategy.parameters.placement != "shard":
        yield "strategy.prefetch strategy.keep", f"{named} never gathers parameters", ""
    if strategy.overlap is False and strategy.prefetch:
        yield "strategy.prefetch", "nothing is gathered ahead without overlap", ""


def _of_a_run(config: Config) -> Iterator[Idle]:
    chosen, cluster, events = config.optimizer, config.cluster, config.events
    for name in OPTIMIZERS.own:
        unread = sorted(set(OPTIMIZERS[name].keys) - set(OPTIMIZERS[chosen.name].keys))
        keys = " ".join(f"optimizer.{key}" for key in unread)
        yield keys, f"optimizer.name={chosen.name} does not read it", f"use optimizer={name}"
    if chosen.schedule == "constant":
        remedy = "use optimizer.schedule=cosine or linear"
        yield "optimizer.min_lr_ratio", "optimizer.schedule=constant", remedy
    if cluster.device == "cpu":
        yield "cluster.gpu cluster.network", "cluster.device=cpu", "use cluster.device=cuda"
    if cluster.device_memory_gib is None and cluster.gpu is None:
        remedy = "set cluster.device_memory_gib"
        yield "cluster.reserved_gib", "cluster.device_memory_gib=null", remedy
    if cluster.kind == "slurm":
        yield "cluster.link", "nodes of cluster=slurm have links", "use cluster=local"
    else:
        yield OF_SLURM, "ranks run on this machine", "use cluster=slurm"
    if "retry" not in (events.stall, events.out_of_memory):
        yield "events.retries", "nothing is tried again", "set events.stall=retry"


def _of_needs(config: Config) -> Iterator[Idle]:
    for key, needed in NEEDS.items():
        if not (value := value_of(config, needed)):
            remedy = f"set {needed}=true" if value is False else f"set {needed}"
            yield key, f"{needed}={as_typed(value)}", remedy
