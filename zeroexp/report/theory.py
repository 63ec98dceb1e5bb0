"""The table of stages in bytes: what a rank would hold and send if only placements mattered. Pure.

A stage's table (README.md) knows placements, dtypes and the number of ranks. It knows no imbalance, padding, buffers
or schedules; a run differs from it by just these, and `words.py` says by which.
"""

from __future__ import annotations

import json
from typing import Any

from zeroexp.config.engines import ENGINES, stage_carried_out
from zeroexp.config.keys import OptimizerConfig
from zeroexp.config.optimizer import OPTIMIZERS
from zeroexp.cut.moment_blocks import INT8
from zeroexp.cut.stage import Move, Placement, Stage, default_reduce_each
from zeroexp.tracking.run import Run

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Bytes that each move sends, as a multiple of (N-1)/N of what it moves; freeing and slicing send nothing.
SENDS = {Move.ALL_GATHER: 1, Move.REDUCE_SCATTER: 1, Move.ALL_REDUCE: 2}


def stage_of(run: Run) -> Stage | None:
    """Return where the run's parameters, gradients and optimizer state rest; None for a stage that nobody knows."""
    return stage_carried_out(run.implementation, run.strategy)


def table_bytes(run: Run) -> dict[str, int] | None:
    """Return the bytes by kind that the table gives a rank after backward; None where it cannot be said."""
    stage, number = stage_of(run), run.summary and run.summary.num_parameters
    if stage is None or number is None:
        return None
    master, compute = _size(run, "master"), _size(run, "compute")
    has_master = run.config.get("precision.master") != run.config.get("precision.compute")
    moments, dtype = _num_moments(run), run.config.get("optimizer.moments")
    size = ITEMSIZE.get(str(dtype), master)
    on_device = run.config.get("strategy.offload") in (None, "null")
    if moments is None:
        return None
    share = {
        place: number // (run.world_size // _replicas(run)) if place is Placement.SHARD else number
        for place in Placement
    }
    return {
        "parameters": compute * share[stage.parameters],
        "gradients": _size(run, "reduce") * share[stage.gradients],
        "optimizer": moments * size * share[stage.optimizer] if on_device else 0,
        "master": master * share[stage.optimizer] if has_master and on_device else 0,
    }


def table_traffic(run: Run) -> dict[str, int] | None:
    """Return the bytes by kind that the table lets a rank send in one step; None where it cannot be said."""
    stage, number = stage_of(run), run.summary and run.summary.num_parameters
    if stage is None or number is None or _replicas(run) > 1:
        return None
    compute, reduce = (number * _size(run, kind) for kind in ("compute", "reduce"))
    each_microbatch = _reduces_each_microbatch(run, stage)
    times = num_microbatches(run)
    reduction = stage.reduce if stage.reduce is not Move.NOTHING else stage.hand_over
    resharded = not (run.implementation == "torch" and run.strategy == "zero2")
    sent = {
        "gather": (2 * times if resharded else 1) * SENDS.get(stage.gather, 0) * compute,
        "reduce": (times if each_microbatch else 1) * SENDS.get(reduction, 0) * reduce,
        "publish": SENDS.get(stage.publish, 0) * compute,
    }
    parts = run.world_size
    return {kind: num_bytes * (parts - 1) // parts for kind, num_bytes in sent.items() if num_bytes}


def num_microbatches(run: Run) -> int:
    """Return the number of microbatches in a step."""
    samples = int(run.config["data.global_batch_size"])
    return max(1, samples // (int(run.config["data.micro_batch_size"]) * run.world_size))


def _reduces_each_microbatch(run: Run, stage: Stage) -> bool:
    if run.implementation in ENGINES:
        return False
    settings = (run.engine.get("reduce_each"), run.config.get("strategy.reduce_each"))
    chosen = [word for word in settings if word not in (None, "null")]
    return [*chosen, default_reduce_each(stage.gradients.value)][0] == "microbatch"


def _replicas(run: Run) -> int:
    chosen = run.config.get("strategy.replicas")
    return 1 if chosen in (None, "null") else int(chosen)


def _num_moments(run: Run) -> int | None:
    """Return how many moments the optimizer keeps of each weight; None for one that differs or is not loaded."""
    name = run.config.get("optimizer.name", "adamw")
    if name not in OPTIMIZERS:
        return None
    kind, own = OPTIMIZERS[name], "optimizer.settings."
    kinds = any(key.startswith("optimizer.kinds.") for key in run.config)
    in_blocks = run.config.get("optimizer.moments") == INT8
    if kind.whole_matrices or kinds or in_blocks:  # what it keeps depends on shapes
        return None
    settings = {
        key.removeprefix(own): _value(word)
        for key, word in run.config.items()
        if key.startswith(own)
    }
    momentum = float(run.config.get("optimizer.momentum", 0))
    return kind.num_moments(
        OptimizerConfig(momentum=momentum, settings={**kind.settings, **settings})
    )


def _value(word: str) -> Any:
    """Return what `flatten` has written as a word: JSON, but for strings."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def _size(run: Run, kind: str) -> int:
    return ITEMSIZE.get(run.config.get(f"precision.{kind}", "float32"), 4)
