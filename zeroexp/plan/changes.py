"""A point with other values of some settings, planned: what every answer that compares is made of.

    fit             more ranks, rehearsed: the first at which a step fits
    advise          stages, recomputation and micro-batches, rehearsed: the fastest that fits

What the line names stays as it is. So a stage under which a word of the line has no meaning is none to compare.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

from zeroexp.check import check
from zeroexp.check.sweep_points import fitting_batch
from zeroexp.check.try_strategy import check_custom_layout_and_optimizer
from zeroexp.config.keys import (
    ENGINE_SETTINGS,
    MASTER,
    Config,
    PrecisionConfig,
    resolve,
)
from zeroexp.cut.codec_bytes import CODE_BITS
from zeroexp.cut.stage import STAGES
from zeroexp.plan.outcome import PlannedPoint, plan_point

MICRO, SEQ_LEN = "data.micro_batch_size", "data.seq_len"
RECOMPUTES = "train.activation_checkpointing"
OPEN = (*ENGINE_SETTINGS, "gradient_as_bucket_view")  # of `strategy`: a stage has its own defaults
PRECISIONS = {"bf16_master": ("bfloat16", "float32", "float32")}


def planned_change(
    of: PlannedPoint, settings: Mapping[str, Any], named: Collection[str] = ()
) -> PlannedPoint:
    """Return the point with other values by key, named by the words that set them. Raises ConfigError: not defined.

    named: the keys that its line sets.
    """
    config = with_settings(of.config, settings, named)
    words = " ".join(f"{key}={_word(value)}" for key, value in settings.items())
    check(config, on_paper=True)
    check_custom_layout_and_optimizer(config)
    return plan_point(config, of.model, of.machines.device, words)


def with_settings(
    config: Config, settings: Mapping[str, Any], named: Collection[str] = ()
) -> Config:
    """Return the config with other values by key, and with what follows from them but for the keys in `named`."""
    config = deepcopy(config)
    for key, value in settings.items():
        _set(config, key, value, named)
    return resolve(config)


def _set(config: Config, key: str, value: Any, named: Collection[str]) -> None:
    group, _, name = key.partition(".")
    if key == "strategy":
        _set_stage(config, value, named)
    elif key == "precision":
        _set_precision(config, value)
    elif key == "world_size":  # with at least one microbatch for each rank
        config.world_size, data = value, config.data
        step = data.micro_batch_size * value
        data.global_batch_size = fitting_batch(data.global_batch_size, step)
    else:
        setattr(getattr(config, group), name, value)
    if key == RECOMPUTES and not value:
        config.train.recompute_every, config.train.recompute_except = None, []


def _set_stage(config: Config, stage: str, named: Collection[str]) -> None:
    strategy = config.strategy
    if stage == strategy.name:  # perhaps a name of the user's own
        return
    strategy.name, row = stage, STAGES[stage]
    placements = row.parameters, row.gradients, row.optimizer
    for each, placement in zip(strategy.rows, placements, strict=True):
        each.placement = placement.value
    for key in OPEN:
        if f"strategy.{key}" not in named:
            setattr(strategy, key, None)


def _set_precision(config: Config, name: str) -> None:
    config.precision = PrecisionConfig(name, *PRECISIONS[name])
    for row, dtype in zip(config.strategy.rows, PRECISIONS[name], strict=True):
        if row.dtype not in (MASTER, *CODE_BITS):
            row.dtype = dtype


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
