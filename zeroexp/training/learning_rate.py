"""The learning rate of each step: warm-up, then the schedule of `optimizer.schedule`."""

from __future__ import annotations

import math

from zeroexp.config.keys import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the rate of the 0-based `step`: it rises linearly over `warmup_steps`, then follows the schedule.

    It reaches `lr` in the last warm-up step and `lr * min_lr_ratio` in the last step of the run.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    first = max(config.warmup_steps - 1, 0)  # the step whose rate is `lr`
    progress = min((step - first) / max(total_steps - 1 - first, 1), 1.0)
    fall = progress if config.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return config.lr * (1 - (1 - config.min_lr_ratio) * fall)
