"""What the config may ask of DeepSpeed: its own settings, and the points that are refused. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from zeroexp.config.families import MODELS
from zeroexp.config.keys import Config
from zeroexp.config.optimizer import OPTIMIZERS

# Keys of DeepSpeed's `zero_optimization`, with which a stage does what its name says. DeepSpeed's own defaults are a
# bucket of 500M elements, for models a hundred times as large, and three that leave parameters of zero3 gathered: 50M
# elements are prefetched, those of less than 100,000 stay, and so do those that are used again within 1,000M.
SETTINGS: dict[str, Any] = {
    "reduce_bucket_size": 5_000_000,
    "overlap_comm": False,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
}

LABELS = {
    "zero1": "DeepSpeed: all-reduces gradients, and keeps masters also in fp32",
    "zero2": "DeepSpeed: all-reduces gradients, and keeps masters also in fp32",
    "zero3": "DeepSpeed: keeps masters also in fp32, room for gradients, and a bucket",
}


def bucket_numel(settings: Mapping[str, Any], numel: int) -> int:
    """Return the elements of a bucket of reductions: no more than the model trains."""
    return max(min(settings["reduce_bucket_size"], numel), 1)


def refuse(config: Config) -> str | None:
    """Return why DeepSpeed can not train a point, or would ignore what it says."""
    strategy, mode = config.strategy, config.precision
    if find_spec("deepspeed") is None:
        return "DeepSpeed is not installed: pip install zeroexp[deepspeed], see docs/deepspeed.md"
    if mode.autocast or mode.master != "float32":
        return "DeepSpeed keeps masters in float32: use precision=fp32, bf16_master or paper16"
    if MODELS[config.model.family].skips_modules:
        return f"DeepSpeed hangs where ranks skip modules, as those of {config.model.family}"
    if config.optimizer.kinds:
        return "DeepSpeed has one optimizer for all parameters: leave optimizer.kinds empty"
    if OPTIMIZERS[config.optimizer.name].whole_matrices:
        return (
            f"DeepSpeed cuts the matrices that optimizer.name={config.optimizer.name} steps whole"
        )
    if config.optimizer.moments is not None:
        return "DeepSpeed keeps moments in float32: leave optimizer.moments null"
    for key, value in strategy.settings.items():
        if key not in SETTINGS:  # which another rule refuses
            continue
        if key.startswith("stage3") and strategy.name != "zero3" and value != SETTINGS[key]:
            return f"strategy.settings.{key}={value} has no effect in strategy={strategy.name}"
        if type(value) is not type(SETTINGS[key]) or value < 0:
            kind = type(SETTINGS[key]).__name__
            return f"strategy.settings.{key}={value} is no {kind} of 0 or more"
    return None
