"""Rules about this machine, which a run needs: GPUs, memory for ranks, nodes, folders; a plan has its own nodes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import cache

from zeroexp.check.refusal import Refusal
from zeroexp.config.engines import ENGINES
from zeroexp.config.job_shape import job_shape_of
from zeroexp.config.keys import Config

MOST_RANKS_HERE = 1024
# What a rank of the smallest model has of its own, beside what it shares with its parent.
BYTES_OF_A_RANK = 48 << 20


def check_device(config: Config) -> Iterator[Refusal]:
    key, device = "cluster.device", config.cluster.device
    if config.cluster.kind == "slurm":
        if device == "auto":
            yield key, "Slurm must be told what to ask for", "use cluster.device=cuda or cpu"
    elif device == "cuda" and num_gpus() < config.world_size:
        problem = f"{num_gpus()} GPUs here for world_size={config.world_size}"
        yield key, problem, "use cluster.device=auto or cpu"


@cache
def num_gpus() -> int:
    """Count the GPUs that this process may use, in one that ends: it may fork ranks, and so must not start CUDA itself.

    torch asks NVML, and CUDA where that does not tell, as of a part of a GPU (MIG).
    """
    import torch  # for a second, and most lines ask for no GPU

    if torch.cuda.is_initialized():  # in a rank
        return torch.cuda.device_count()
    if (pid := os.fork()) == 0:
        count = 0
        try:
            count = torch.cuda.device_count()
        finally:
            os._exit(count)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def check_ranks_fit_host_memory(config: Config) -> Iterator[Refusal]:
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


def check_named_gpu(config: Config) -> Iterator[Refusal]:
    for key in ("gpu", "network"):
        if getattr(config.cluster, key) is not None and config.cluster.kind != "slurm":
            problem = "a plan takes it, and a run on this machine has the GPUs that are here"
            yield f"cluster.{key}", problem, "leave it out"


def check_nodes(config: Config, device: str = "cpu") -> Iterator[Refusal]:
    """Require nodes that hold whole groups of strategy.secondary_partition, and not all that shard.

    device: that of a plan. On one machine ranks are on one node, or behind cluster.link, whatever they run on.
    """
    key, size, shards = "strategy.secondary_partition", None, config.grid.group_size
    if config.strategy.implementation not in ENGINES:
        size = config.strategy.secondary_partition
    on_node = job_shape_of(config, device).ranks_per_node
    if size and shards <= on_node:
        problem = f"the {shards} ranks that shard are on one node, which no gather leaves"
        more = "cluster=slurm or cluster.link"
        if config.cluster.kind == "slurm":
            more = "a lower cluster.slurm.ranks_per_node"
        yield key, problem, f"use {more}, or leave it out"
    if size and on_node % size:
        most = math.gcd(on_node, shards)
        sizes = ", ".join(str(n) for n in range(2, most + 1) if most % n == 0)
        yield key, f"nodes of {on_node} ranks cut such groups", f"use {sizes or 'null'}"


def check_offload_folder(config: Config) -> Iterator[Refusal]:
    folder = config.strategy.offload_folder
    if folder is not None and config.cluster.kind == "local" and not os.path.isdir(folder):
        yield "strategy.offload_folder", "no such folder", "make it, on a disk, or leave it out"
