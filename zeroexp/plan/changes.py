"""Changes of a point: the config under another stage, batch, precision or number of ranks, and its words.

A change keeps what the line says where that has a meaning still, and takes back what has none any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import deepcopy
from typing import NamedTuple

from zeroexp.config.keys import ENGINE_SETTINGS, TORCH_DDP, Config, PrecisionConfig, resolve
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.stage import STAGES, Placement
from zeroexp.models.module import BuiltModel

SETTINGS = (*ENGINE_SETTINGS, "gradient_as_bucket_view")  # of `strategy`; null unless set
PRECISIONS = {
    "fp32": ("float32", "float32", "float32"),
    "bf16_master": ("bfloat16", "float32", "float32"),
}


class Change(NamedTuple):
    words: str  # of a command line
    config: Config  # with them


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


def with_batch(config: Config, micro: int, batch: int | None = None) -> Config:
    """Return the config with another micro-batch and, where it is given, another global batch."""
    config = deepcopy(config)
    config.data.micro_batch_size = micro
    config.data.global_batch_size = batch or config.data.global_batch_size
    return config


def with_length(config: Config, seq_len: int) -> Config:
    config = deepcopy(config)
    config.data.seq_len = seq_len
    return config


def with_gpu(config: Config, gpu: str) -> Config:
    config = deepcopy(config)
    config.cluster.gpu = gpu
    return config


def longest_sequence(model: BuiltModel) -> int | None:
    """Return the most positions that the model's config names."""
    return getattr(getattr(model.module, "config", None), "max_position_embeddings", None)


def with_recomputation(config: Config, recomputes: bool) -> Config:
    config = deepcopy(config)
    config.train.activation_checkpointing = recomputes
    if not recomputes:
        config.train.recompute_every, config.train.recompute_except = None, []
    return config


def with_precision(config: Config, name: str) -> Config:
    config = deepcopy(config)
    config.precision = PrecisionConfig(name, *PRECISIONS[name])
    strategy = config.strategy
    rows = (strategy.parameters, strategy.gradients, strategy.optimizer)
    for row, dtype in zip(rows, PRECISIONS[name], strict=True):
        row.dtype = dtype
    return config


def with_setting(config: Config, key: str, value: object) -> Config:
    """Return the config with another value of one of the strategy's settings."""
    config = deepcopy(config)
    strategy = config.strategy
    setattr(strategy, key, value)
    if not LAYOUTS[strategy.implementation].has_owners:
        strategy.owners = None
    if not strategy.overlap:
        strategy.prefetch = None
    return resolve(config)


def states_and_traffic(config: Config) -> Iterator[Change]:
    """Yield every other value of a setting of the strategy."""
    strategy = config.strategy
    for stage in STAGES:
        if stage != strategy.name:
            yield Change(f"strategy={stage}", with_stage(config, stage))
    ranks = 2 * config.world_size
    yield Change(f"world_size={ranks}", with_world(config, ranks))
    if strategy.implementation not in LAYOUTS:
        return
    gathers = strategy.parameters.placement == "shard"
    settings = {
        "unit": ("model", "block", "module"),
        "keep": ("none", "last", "all") if gathers else (),
        "prefetch": (0, 1, 2) if gathers and strategy.overlap else (),
        "bucket_mb": (1, 25, 100),
        "overlap": (True, False),
        "reduce_each": ("microbatch", "step"),
        "implementation": tuple(LAYOUTS),
    }
    for key, values in settings.items():
        for value in values:
            if value != getattr(strategy, key):
                yield Change(f"strategy.{key}={_word(value)}", with_setting(config, key, value))


def activations_and_products(config: Config) -> Iterator[Change]:
    """Yield the changes that closed forms do not see."""
    recomputes = not config.train.activation_checkpointing
    yield Change(recomputation(recomputes), with_recomputation(config, recomputes))
    micro, each = config.data.micro_batch_size, config.data.global_batch_size // config.world_size
    for samples in (micro // 2, 2 * micro):
        if samples and each % samples == 0:
            yield Change(f"data.micro_batch_size={samples}", with_batch(config, samples))
    for name in PRECISIONS:
        if name != config.precision.name:
            yield Change(f"precision={name}", with_precision(config, name))


def recomputation(recomputes: bool) -> str:
    return f"train.activation_checkpointing={_word(recomputes)}"


def complete_words(change: Change, config: Config, device: str, named: Collection[str] = ()) -> str:
    """Return the words of a change of `config` with all that a command line needs beside them.

    These take back settings that have no meaning any more, name the batch if it has changed, and name the device where
    cluster.device=auto may mean another one for more ranks. `named` are the keys that the line sets: one that repeats a
    default is not seen otherwise.
    """
    words, changed = change
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
    if batch != config.data.global_batch_size and "data.global_batch_size=" not in words:
        needed.append(f"data.global_batch_size={batch}")
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
