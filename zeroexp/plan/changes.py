"""Changes of a point: the config with other values of some settings, and the words that set them.

A change keeps what the line says where that has a meaning still, and takes back what has none any more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from zeroexp.config.keys import ENGINE_SETTINGS, TORCH_DDP, Config, PrecisionConfig, resolve
from zeroexp.cut.codes import CODE_BITS
from zeroexp.cut.stage import STAGES, Placement
from zeroexp.models.module import BuiltModel
from zeroexp.plan.composed_points import BATCH

MICRO, SEQ_LEN = "data.micro_batch_size", "data.seq_len"
RECOMPUTES = "train.activation_checkpointing"
SETTINGS = (*ENGINE_SETTINGS, "gradient_as_bucket_view")  # of `strategy`; null unless set
PRECISIONS = {"bf16_master": ("bfloat16", "float32", "float32")}


class Change(NamedTuple):
    words: str  # of a command line
    config: Config  # with them


def change(config: Config, settings: Mapping[str, Any]) -> Change:
    """Return the config with other values by key, and the words of a command line that set them."""
    words = " ".join(f"{key}={_word(value)}" for key, value in settings.items())
    return Change(words, with_settings(config, settings))


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the config with other values by key, and with what follows from them."""
    makers = {"strategy": with_stage, "precision": _with_precision, "world_size": with_world}
    for key, value in settings.items():
        make = makers.get(key)
        config = make(config, value) if make else _with_value(config, key, value)
    return config


def with_stage(config: Config, stage: str) -> Config:
    """Return the config under another stage, with those of its settings that have a meaning there."""
    if stage == config.strategy.name:
        return config
    config = _with_open_settings(config)
    strategy, row = config.strategy, STAGES[stage]
    strategy.name = stage
    strategy.parameters.placement = row.parameters.value
    strategy.gradients.placement = row.gradients.value
    strategy.optimizer.placement = row.optimizer.value
    if row.parameters is not Placement.SHARD:
        strategy.keep = strategy.prefetch = None
    if row.optimizer is not Placement.SHARD:
        strategy.owners = None
    if row.gradients is Placement.PARTIAL and strategy.reduce_each == "microbatch":
        strategy.reduce_each = None
    if stage not in TORCH_DDP:
        strategy.gradient_as_bucket_view = None
    elif strategy.implementation == "torch":
        strategy.unit = None
    return resolve(config)


def with_world(config: Config, world_size: int) -> Config:
    """Return the config at another world size, with at least one microbatch for each rank."""
    config = deepcopy(config)
    config.world_size = world_size
    step = config.data.micro_batch_size * world_size
    config.data.global_batch_size = max(1, config.data.global_batch_size // step) * step
    return config


def _with_precision(config: Config, name: str) -> Config:
    config = deepcopy(config)
    config.precision = PrecisionConfig(name, *PRECISIONS[name])
    for row, dtype in zip(config.strategy.rows, PRECISIONS[name], strict=True):
        if row.dtype not in CODE_BITS:
            row.dtype = dtype
    return config


def _with_value(config: Config, key: str, value: object) -> Config:
    config = deepcopy(config)
    group, _, name = key.partition(".")
    setattr(getattr(config, group), name, value)
    if key == RECOMPUTES and not value:
        config.train.recompute_every, config.train.recompute_except = None, []
    return config


def longest_sequence(model: BuiltModel) -> int | None:
    """Return the most positions that the model's config names."""
    return getattr(getattr(model.module, "config", None), "max_position_embeddings", None)


def complete_words(made: Change, config: Config, device: str, named: Collection[str] = ()) -> str:
    """Return the words of a change of `config` with all that a command line needs beside them.

    These take back settings that have no meaning any more, name the batch if it has changed, and name the device where
    cluster.device=auto may mean another one for more ranks. `named` are the keys that the line sets: one that repeats a
    default is not seen otherwise.
    """
    words, changed = made
    before, after = (_with_open_settings(each).strategy for each in (config, changed))
    needed = [
        f"strategy.{key}=null"
        for key in SETTINGS
        if getattr(changed.strategy, key) != getattr(config.strategy, key)
        and (getattr(before, key) is not None or f"strategy.{key}" in named)
        and getattr(after, key) is None
        and f"strategy.{key}=" not in words
    ]
    batch = changed.data.global_batch_size
    if batch != config.data.global_batch_size and f"{BATCH}=" not in words:
        needed.append(f"{BATCH}={batch}")
    more_ranks = changed.world_size != config.world_size
    if more_ranks and config.cluster.device == "auto" and device == "cpu":
        needed.append("cluster.device=cpu")
    return " ".join([words, *needed])


def _with_open_settings(config: Config) -> Config:
    """Return a copy in which settings are open that hold what `resolve` gives an open one."""
    config = deepcopy(config)
    for key in SETTINGS:
        value = getattr(config.strategy, key)
        setattr(config.strategy, key, None)
        if getattr(resolve(config).strategy, key) != value:
            setattr(config.strategy, key, value)
    return config


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
