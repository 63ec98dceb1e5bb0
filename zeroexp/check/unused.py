"""Refuse settings that the chosen path would ignore.

A key without a null default counts as set where it differs from the default of its schema.
"""

from __future__ import annotations

from dataclasses import fields

from zeroexp.check.refusal import refuse_combination
from zeroexp.config import plugins
from zeroexp.config.families import MODELS
from zeroexp.config.keys import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    OptimizerConfig,
    SlurmConfig,
    TrackingConfig,
    TrainConfig,
)
from zeroexp.config.optimizer import OPTIMIZERS

SLURMS_OWN = ("dry_run", "wait", "heartbeat_s", "rehearse_s", "force")


def check_settings_of_plugins(config: Config) -> None:
    """Allow settings of a plugin's word only with that word."""
    for key, problem, remedy in plugins.unknown_settings(config):
        refuse_combination(config, key, problem, remedy)


def check_model_shape_is_used(config: Config) -> None:
    """Allow keys of a model's shape only where its family reads them."""
    family = config.model.family
    read = MODELS[family].shape
    for name in ("hf_config", "mlp", "moe", "settings"):
        given = getattr(config.model, name)
        if name != read and given:
            key = f"model.{name}.{next(iter(given))}"
            problem = f"no effect, model.family={family} reads model.{read}"
            refuse_combination(config, key, problem, f"set model.{read}.*, or choose another model")


def check_optimizer_settings_are_used(config: Config) -> None:
    chosen = config.optimizer
    named = f"optimizer.name={chosen.name}"
    for name in OPTIMIZERS.own:
        for key in set(OPTIMIZERS[name].keys) - set(OPTIMIZERS[chosen.name].keys):
            remedy = f"use optimizer={name}"
            _unless_default(config, f"optimizer.{key}", OptimizerConfig, named, remedy)
    if chosen.schedule == "constant":
        why = "optimizer.schedule=constant"
        remedy = "use optimizer.schedule=cosine or linear"
        _unless_default(config, "optimizer.min_lr_ratio", OptimizerConfig, why, remedy)
    if chosen.weight_decay == 0:
        key, why = "optimizer.decay_norms_and_biases", "optimizer.weight_decay=0"
        _unless_default(config, key, OptimizerConfig, why, "set optimizer.weight_decay")


def check_checkpoint_settings_are_used(config: Config) -> None:
    if config.checkpoint.every is None:
        why = "checkpoint.every=null"
        _unless_default(config, "checkpoint.keep", CheckpointConfig, why, "set checkpoint.every")


def check_profiled_ranks(config: Config) -> None:
    if not config.train.profile_steps:
        key, why = "train.profile_ranks", "train.profile_steps=[]"
        _unless_default(config, key, TrainConfig, why, "set train.profile_steps")


def check_recomputation_settings_are_used(config: Config) -> None:
    if not config.train.activation_checkpointing:
        why, remedy = "train.activation_checkpointing=false", "set it to true"
        for key in ("train.recompute_every", "train.recompute_except"):
            _unless_default(config, key, TrainConfig, why, remedy)
    if config.train.recompute_except and config.strategy.unit == "module":
        # torch counts each operator of forward and of the recomputation, and those of gathers differ.
        problem = (
            "strategy.unit=module gathers inside of recomputed blocks, whose operators torch counts"
        )
        refuse_combination(config, "train.recompute_except", problem, "use strategy.unit=block")


def check_tracking_settings_are_used(config: Config) -> None:
    if not config.tracking.mlflow:
        for key in ("tracking.uri", "tracking.experiment"):
            why = "tracking.mlflow=false"
            _unless_default(config, key, TrackingConfig, why, "use tracking=mlflow")


def check_reserved_memory(config: Config) -> None:
    """Refuse memory that is set aside of nothing, or of less than itself."""
    limit, reserved = config.cluster.device_memory_gib, config.cluster.reserved_gib
    key = "cluster.reserved_gib"
    if reserved is None:
        return
    if limit is None:
        remedy = "set cluster.device_memory_gib, or leave it out"
        refuse_combination(config, key, "no effect with cluster.device_memory_gib=null", remedy)
    if reserved >= limit:
        problem = f"leaves nothing of cluster.device_memory_gib={limit:g}"
        refuse_combination(config, key, problem, "use less than that")


def check_slurms_own_keys(config: Config) -> None:
    """Refuse settings of job submission if nothing is submitted to Slurm."""
    if config.cluster.kind == "slurm":
        return
    why, remedy = "ranks run on this machine", "use cluster=slurm"
    for name in SLURMS_OWN:
        _unless_default(config, f"cluster.{name}", ClusterConfig, why, remedy)
    for field in fields(SlurmConfig):
        _unless_default(config, f"cluster.slurm.{field.name}", SlurmConfig, why, remedy)


def _unless_default(config: Config, key: str, schema: type, why: str, remedy: str) -> None:
    """Refuse the key unless it has its schema's default."""
    group, _, name = key.rpartition(".")
    owner = config
    for part in group.split("."):
        owner = getattr(owner, part)
    if getattr(owner, name) != getattr(schema(), name):
        refuse_combination(config, key, f"no effect with {why}", f"{remedy}, or leave it out")


RULES = (
    check_settings_of_plugins,
    check_model_shape_is_used,
    check_optimizer_settings_are_used,
    check_checkpoint_settings_are_used,
    check_recomputation_settings_are_used,
    check_profiled_ranks,
    check_tracking_settings_are_used,
    check_reserved_memory,
    check_slurms_own_keys,
)
