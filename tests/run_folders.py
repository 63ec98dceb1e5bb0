"""Run folders as a sweep leaves them, made by the writers that a sweep uses, with numbers from closed forms."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from zeroexp.config.keys import Config, save
from zeroexp.measure.record import RankSummary, StepRecord, Traffic, VerbSeconds
from zeroexp.measure.summary import summarise, summarise_rank
from zeroexp.tracking.files import RecordWriter, write_json, write_summary
from zeroexp.tracking.mlflow import MlflowTracker

PARAMETER_BYTES = 96 * 2**20
WARMUP_STEPS = 3
SPEED: dict[str, Any] = {
    "model_flops_per_step": 2e11,
    "peak_flops_per_second": 4e12,
    "peak_flops_source": "calibrated",
    "peak_flops_name": "fastest product of matrices in float32",
}
# Of parameters, gradients, optimizer: True where the stage shards them.
SHARDED = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
}

# Of a study.
STRATEGIES = ("ddp", "zero2", "zero3")
WORLD_SIZES = (1, 2, 4)


def log_study(outputs: Path) -> dict[str, str]:
    """Into a new store, beside the run of another sweep; each saved view's title, and its link."""
    tracker = MlflowTracker(None, "zeroexp", outputs)
    started = time.time() - 3600
    for strategy, world_size in product(STRATEGIES, WORLD_SIZES):
        folder = outputs / "study" / f"{strategy}-buffer-n{world_size}"
        tracker.log_run(write_run(folder, strategy, "buffer", world_size, started=started))
    tracker.log_run(write_run(outputs / "other" / "of-another-sweep", started=started))
    return dict(tracker.write_views("study"))


def write_run(
    folder: Path,
    strategy: str = "zero3",
    implementation: str = "buffer",
    world_size: int = 2,
    *,
    num_steps: int = 23,
    status: str = "done",
    reason: str | None = None,
    started: float = 1_790_000_000.0,
) -> Path:
    """`num_steps` counts warm-up steps; a run that is not done has no summary."""
    (folder / "logs").mkdir(parents=True)
    write_config(folder, strategy, implementation, world_size)
    write_json(
        folder / "environment.json",
        {
            "command": "zeroexp -m study=compare",
            "host": "laptop",
            "machine": {"processor": "a processor", "num_cpus": 2},
            "git": {"commit": "0123abc", "dirty": False},
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
        },
    )
    for rank in range(world_size):
        (folder / "logs" / f"rank{rank}.log").write_text(f"rank {rank} of {world_size}: ready\n")
    ranks = [records(strategy, world_size, rank, num_steps) for rank in range(world_size)]
    with RecordWriter(folder) as writer:
        for record in ranks[0]:
            writer.write(record)
    if status == "done":
        made = summarise(ranks[0], summaries(ranks))
        write_summary(folder, replace(made, num_parameters=PARAMETER_BYTES // 4, **SPEED))
    times = {"running_at": started, f"{status}_at": started + 60.0}
    write_json(folder / "state.json", {"status": status, "reason": reason, **times})
    return folder


def write_config(folder: Path, strategy: str, implementation: str, world_size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = Config(world_size=world_size)
    config.strategy.name, config.strategy.implementation = strategy, implementation
    save(config, folder / "config.yaml")


def summaries(ranks: list[list[StepRecord]]) -> list[RankSummary]:
    return [summarise_rank(rank, records) for rank, records in enumerate(ranks)]


def records(strategy: str, world_size: int, rank: int, num_steps: int) -> list[StepRecord]:
    return [record(step, strategy, world_size, rank) for step in range(num_steps)]


def record(
    step: int, strategy: str = "zero3", world_size: int = 2, rank: int = 0, **changes: Any
) -> StepRecord:
    p, g, o = (PARAMETER_BYTES // (world_size if sharded else 1) for sharded in SHARDED[strategy])
    seconds = 0.4 / world_size + 0.01 * (step % 3) + 0.05 * list(SHARDED).index(strategy)
    memory = {
        "at_rest": {"parameters": p, "gradients": 0, "optimizer": 2 * o, "master": 0, "buffers": 0},
        "after_backward": {
            "parameters": p,
            "gradients": g,
            "optimizer": 2 * o,
            "master": 0,
            "buffers": 0,
        },
    }
    sent = 2 * PARAMETER_BYTES * (world_size - 1) // world_size
    made = StepRecord(
        step=step,
        warmup=step < WARMUP_STEPS,
        samples_seen=12 * (step + 1),
        loss=3.0 + 4.0 * math.exp(-step / 8),
        grad_norm=1.0 + 1.0 / (step + 1),
        lr=1e-3,
        num_tokens=12 * 128,
        step_seconds=seconds,
        phase_seconds={"forward": 0.3 * seconds, "backward": 0.5 * seconds, "step": 0.2 * seconds},
        memory_bytes=memory if step == WARMUP_STEPS - 1 else None,
        peak_bytes=p + g + 2 * o + 2**20 * (10 + rank),
        allocated_bytes=None,
        traffic=Traffic(
            {"gather": sent // 2, "reduce": sent - sent // 2}, {"gather": 8, "reduce": 8}
        ),
        verbs={
            "gather": VerbSeconds(8, working=0.01, overlapped=0.03, exposed=0.02),
            "reduce": VerbSeconds(8, working=0.01, overlapped=0.04, exposed=0.01 * rank),
        },
        waited_seconds={str(1 - rank): 0.01 * rank} if world_size > 1 else {},
    )
    whole = {"traffic": made.traffic, "verbs": made.verbs}
    return StepRecord(**{**asdict(made), **whole, **changes})
