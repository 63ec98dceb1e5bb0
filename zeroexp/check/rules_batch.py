"""Rules about other settings that must fit together: batch, machine, steps, requeue."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from zeroexp.check.refusal import Refusal
from zeroexp.config.keys import Config, resolve

MOST_RANKS_HERE = 1024
# What a rank of the smallest model has of its own, beside what it shares with its parent.
BYTES_OF_A_RANK = 48 << 20


def check_batch(config: Config) -> Iterator[Refusal]:
    """Require that accumulation = global / (micro x world) is a whole number of microbatches."""
    micro, world = config.data.micro_batch_size, config.world_size
    below, rest = divmod(config.data.global_batch_size, micro * world)
    if rest:
        near = [str(count * micro * world) for count in (below, below + 1) if count]
        problem = f"not divisible by data.micro_batch_size={micro} x world_size={world}"
        yield "data.global_batch_size", problem, f"use {' or '.join(near)}"


def check_device(config: Config) -> Iterator[Refusal]:
    key, device = "cluster.device", config.cluster.device
    if config.cluster.kind == "slurm":
        if device == "auto":
            yield key, "Slurm must be told what to ask for", "use cluster.device=cuda or cpu"
    elif device == "cuda" and num_gpus() < config.world_size:
        problem = f"{num_gpus()} GPUs here for world_size={config.world_size}"
        yield key, problem, "use cluster.device=auto or cpu"


def num_gpus() -> int:
    """Count the GPUs that this process may use. torch asks NVML: a process that forks ranks must not start CUDA."""
    import torch  # for a second, and most lines ask for no GPU

    return torch.cuda.device_count()


def check_ranks_fit_machine(config: Config) -> Iterator[Refusal]:
    if config.cluster.kind != "local":
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    reasons = {
        MOST_RANKS_HERE: "more ranks than one machine starts",
        memory // BYTES_OF_A_RANK: f"more ranks than {memory / (1 << 30):.1f} GiB have room for",
    }
    most = min(reasons)
    if config.world_size > most:
        remedy = f"use at most {most}, cluster=slurm, or zeroexp plan"
        yield "world_size", reasons[most], remedy


def check_warmup(config: Config) -> Iterator[Refusal]:
    steps = config.train.warmup_steps + config.train.steps
    if config.optimizer.warmup_steps > steps:
        problem = f"the run is over after {steps} steps, before the learning rate is at its top"
        yield "optimizer.warmup_steps", problem, f"use at most {steps}"


def check_requeue(config: Config) -> Iterator[Refusal]:
    """Allow a requeue in Slurm only if the run saves checkpoints and has the time to save."""
    cluster, key = config.cluster, "cluster.requeue"
    if cluster.requeue and cluster.kind != "slurm":
        yield key, "no effect on this machine", "leave it null"
    if cluster.requeue and config.checkpoint.every is None:
        problem = "nothing is saved that a job could go on from"
        yield key, problem, "set checkpoint.every, or leave it null"
    limit = math.ceil(cluster.timeout_s / 60) * 60
    if resolve(config).cluster.requeue and cluster.slurm.save_s >= limit:
        problem = f"no earlier than the start of a job of cluster.timeout_s={cluster.timeout_s}"
        yield "cluster.slurm.save_s", problem, f"use at most {limit // 2}"


def check_retries(config: Config) -> Iterator[Refusal]:
    retried = [e for e in ("stall", "out_of_memory") if getattr(config.events, e) == "retry"]
    if retried and config.cluster.kind == "slurm":
        problem = "a job of Slurm that failed is over"
        yield f"events.{retried[0]}", problem, "use end, then zeroexp watch FOLDER --rerun failed"


def check_memory_left_free(config: Config) -> Iterator[Refusal]:
    limit, reserved = config.cluster.device_memory_gib, config.cluster.reserved_gib
    if limit is not None and reserved is not None and reserved >= limit:
        problem = f"leaves nothing of cluster.device_memory_gib={limit:g}"
        yield "cluster.reserved_gib", problem, "use less than that"


def check_link(config: Config) -> Iterator[Refusal]:
    """Require that the nodes of a local run share its ranks evenly, and that these are on CPUs."""
    cluster = config.cluster
    if cluster.link is None:
        return
    if config.world_size % cluster.num_nodes:
        problem = f"{cluster.num_nodes} nodes do not share world_size={config.world_size} evenly"
        yield "cluster.link", problem, "use world_size=2 or 4, or another cluster.nodes"
    if cluster.device == "cuda":
        yield "cluster.link", "GPUs do not send through it", "use cluster.device=cpu"


def check_named_gpu(config: Config) -> Iterator[Refusal]:
    for key in ("gpu", "network"):
        if getattr(config.cluster, key) is not None and config.cluster.kind != "slurm":
            problem = "a plan takes it, and a run on this machine has the GPUs that are here"
            yield f"cluster.{key}", problem, "leave it out"


def check_offload_folder(config: Config) -> Iterator[Refusal]:
    folder = config.strategy.offload_folder
    if folder is not None and config.cluster.kind == "local" and not Path(folder).is_dir():
        yield "strategy.offload_folder", "no such folder", "make it, on a disk, or leave it out"


# A run needs these rules about the machine, and a plan does not.
RULES_OF_MACHINE = (
    check_device,
    check_named_gpu,
    check_ranks_fit_machine,
    check_offload_folder,
)
