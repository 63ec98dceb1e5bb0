"""A remedy makes model states fit: a later stage, or more ranks. Each remedy is planned before it is given."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import deepcopy

from zeroexp.check import check
from zeroexp.check.try_strategy import check_strategy
from zeroexp.config.keys import ENGINE_SETTINGS, Config, ConfigError, resolve
from zeroexp.cut.stage import STAGES, Placement
from zeroexp.models.module import BuiltModel
from zeroexp.plan.outcome import PlannedPoint, plan_point

LATER, OF_TORCHS_DDP = ("zero1", "zero2", "zero3"), ("ddp", "zero1")
SETTINGS = (*ENGINE_SETTINGS, "gradient_as_bucket_view")  # of `strategy`; null unless set
MOST_RANKS, MOST_CPU_RANKS = 4096, 64


def remedies(
    config: Config, model: BuiltModel, device: str, named: Collection[str] = ()
) -> list[str]:
    """Return the words after which model states fit: the earliest stage, and the fewest ranks (doubled each time)."""
    found: list[str] = []
    staged = ((f"strategy={stage}", with_stage(config, stage)) for stage in _later(config))
    for words, changed in staged:
        if _fits(changed, model, device):
            found.append(complete_words(words, config, changed, device, named))
            break
    for name in dict.fromkeys((config.strategy.name, "zero3")):
        changed = with_stage(config, name)
        size = smallest_world(changed, model, device, above=config.world_size)
        if size is not None:
            words = f"world_size={size}"
            words = words if name == config.strategy.name else f"strategy={name} {words}"
            changed = with_world(changed, size)
            found.append(complete_words(words, config, changed, device, named))
            break
    return found


def most_ranks(device: str) -> int:
    """Return the largest world size that is tried: CPU ranks share a host, where each pair of ranks counts apart."""
    return MOST_RANKS if device == "cuda" else MOST_CPU_RANKS


def smallest_world(config: Config, model: BuiltModel, device: str, *, above: int = 0) -> int | None:
    """Return the least power of two, or double of `above`, at which model states fit; None up to `most_ranks`."""
    size = 2 * above or 1
    while size <= most_ranks(device):
        if _fits(with_world(config, size), model, device):
            return size
        size *= 2
    return None


def plan_if_defined(config: Config, model: BuiltModel, device: str) -> PlannedPoint | None:
    """Plan a changed point; None if it is not defined."""
    try:
        check(config, on_paper=True)
        check_strategy(config)
        return plan_point(config, model, device)
    except ConfigError:
        return None


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
    if stage not in OF_TORCHS_DDP:
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


def complete_words(
    words: str, config: Config, changed: Config, device: str, named: Collection[str] = ()
) -> str:
    """Return the words of a change with all that a command line needs beside them.

    These take back settings that have no meaning any more, name the batch if it has changed, and name the device where
    cluster.device=auto may mean another one for more ranks. `named` are the keys that the line sets: one that repeats a
    default is not seen otherwise.
    """
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
    if batch != config.data.global_batch_size:
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


def _later(config: Config) -> Iterator[str]:
    now = config.strategy.name
    start = LATER.index(now) + 1 if now in LATER else 0
    yield from LATER[start:]


def _fits(config: Config, model: BuiltModel, device: str) -> bool:
    planned = plan_if_defined(config, model, device)
    return planned is not None and planned.outcome.fits is True
