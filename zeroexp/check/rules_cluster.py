"""Rules about the cluster: what may be queued again, memory that is left free, links between nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zeroexp.check.refusal import Refusal
from zeroexp.config.gpus import GPUS
from zeroexp.config.keys import Config, resolve


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
        yield f"events.{retried[0]}", problem, "use end, then zeroexp --rerun FOLDER"


def check_memory_left_free(config: Config) -> Iterator[Refusal]:
    cluster, reserved = config.cluster, config.cluster.reserved_gib
    limit = cluster.device_memory_gib
    named = f"cluster.device_memory_gib={limit}"
    if limit is None and cluster.gpu in GPUS:
        limit = GPUS[cluster.gpu].memory_gib
        named = f"the {limit} GiB of cluster.gpu={cluster.gpu}"
    if limit is not None and reserved is not None and reserved >= limit:
        yield "cluster.reserved_gib", f"leaves nothing of {named}", "use less than that"


def check_link(config: Config) -> Iterator[Refusal]:
    """Require that the nodes of a local run share its ranks evenly, and that these are on CPUs."""
    cluster = config.cluster
    if cluster.link is None:
        return
    if config.world_size % cluster.num_nodes:
        nodes = cluster.num_nodes
        problem = f"{nodes} nodes do not share world_size={config.world_size} evenly"
        remedy = f"use world_size={nodes} or {2 * nodes}, or another cluster.nodes"
        yield "cluster.link", problem, remedy
    if cluster.device == "cuda":
        yield "cluster.link", "GPUs do not send through it", "use cluster.device=cpu"
