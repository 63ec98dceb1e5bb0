"""What our engine can not carry out, of the settings that the config's strategy and a program's own Options share.

check/rules_strategy.py asks for the one, zero_safety/engine_arguments.py for the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zeroexp.cut.stage import Move, Placement, Stage

LEAVE = "leave it out"


def problems(
    of: Any, stage: Stage, world_size: int, *, codes: str | None, group: str
) -> Iterator[tuple[str, str, str]]:
    """Yield a setting that has no meaning beside the others, what is wrong, and what to use.

    of: StrategyConfig or Options, whose values are of the right types. codes: the codec in whose codes parameters rest.
    group: what the caller writes before the name of a setting, "strategy." or "options.".
    """
    replicas, num_ranks, every = of.replicas or 1, of.secondary_partition, every_of(of)
    shards = world_size // replicas
    if replicas > 1 and (why := why_no_replicas(replicas, stage, world_size, differ=bool(every))):
        yield "replicas", *why
    if of.optimizer_over == "all" and (why := why_not_over_all(of)):
        yield "optimizer_over", *why
    if num_ranks is not None and (why := why_no_secondary_copy(num_ranks, stage, shards)):
        yield "secondary_partition", *why
    if num_ranks is not None and of.offload == "all":
        problem = f"keeps on the device what {group}offload=all puts on the host"
        yield "secondary_partition", problem, "use one of them"
    if every and replicas == 1:
        problem = "there is one replica, and nothing to join"
        yield "outer", problem, f"set {group}replicas=2 or more"
    if every and of.offload:
        yield "offload", f"not with {group}outer, which keeps its own on the device", LEAVE
    yield from _of_moves(of, stage, shards, group)
    yield from _of_host(of, stage, codes, group)


def _of_moves(of: Any, stage: Stage, shards: int, group: str) -> Iterator[tuple[str, str, str]]:
    gathers = stage.gather is Move.ALL_GATHER
    if of.gather_codec and not gathers:
        remedy = f"use zero3, or {LEAVE}"
        yield "gather_codec", "parameters that rest whole are not gathered", remedy
    if of.masters_rest and (not gathers or shards == 1):
        problem = "parameters that rest whole are computed with as they rest"
        yield "masters_rest", problem, f"use zero3 on two ranks or more that shard, or {LEAVE}"
    if of.reduce_codec and stage.gradients is Placement.REPLICATE:
        remedy = f"use zero1, zero2 or zero3, or {LEAVE}"
        yield "reduce_codec", "gradients are all-reduced", remedy
    if _is_set(of, "error_feedback") and not of.reduce_codec:
        yield "error_feedback", "gradients are not rounded", f"set {group}reduce_codec, or {LEAVE}"
    if stage.gradients is Placement.PARTIAL and of.reduce_each == "microbatch":
        yield "reduce_each", "gradients that rest partial are reduced once", "use step, or zero2"
    if _is_set(of, "publish") and (of.overlap is False or stage.publish is not Move.ALL_GATHER):
        remedy = f"use zero1 or zero2 with overlap, or {LEAVE}"
        yield "publish", "nothing is on its way after a step", remedy


def _of_host(
    of: Any, stage: Stage, codes: str | None, group: str
) -> Iterator[tuple[str, str, str]]:
    if of.offload and of.masters_rest and not codes:
        yield "offload", "each gather would bring masters from the host", LEAVE
    if of.offload == "all" and codes:
        yield "offload", "codes of parameters rest on the device", "use optimizer"
    if of.offload == "all" and stage.gather is not Move.ALL_GATHER:
        yield "offload", "parameters that rest whole stay on the device", "use optimizer, or zero3"
    for key in (key for key in ("offload_fraction", "offload_folder") if _is_set(of, key)):
        if of.masters_rest:
            yield key, "not beside masters or codes at rest", LEAVE
        if of.offload is None:
            yield key, "nothing is offloaded", f"set {group}offload, or {LEAVE}"


def _is_set(of: Any, key: str) -> bool:
    return getattr(of, key) != getattr(type(of), key)  # its default


def every_of(of: Any) -> int | None:
    """Return the steps between two outer ones; None: replicas never differ."""
    return getattr(of.outer, "every", None)


def why_not_over_all(of: Any) -> tuple[str, str] | None:
    """Return why an optimizer can not rest over the ranks of all replicas, and what to do; None where it can."""
    if (of.replicas or 1) == 1:
        return "one group is all ranks", "set replicas, or leave it out"
    if every_of(of):
        return "with `outer` each replica updates all of its weights", "use one of them"
    if of.masters_rest:
        return "pieces that rest are masters", "let parameters rest apart, in a dtype of their own"
    if of.offload == "all":
        return "pieces on the host are sent between no replicas", "use offload=optimizer"
    return None


def why_no_replicas(
    replicas: int, stage: Stage, world_size: int, *, differ: bool = False
) -> tuple[str, str] | None:
    """Return why a stage on these ranks can have no replicas, and what to do; None where it can.

    differ: the replicas are seldom synchronised, so that each may be a single rank.
    """
    if stage.optimizer is not Placement.SHARD:
        return "every rank is a replica already, nothing is sharded", "use zero1, zero2 or zero3"
    if stage.gradients is Placement.REPLICATE and not differ:
        return "gradients that rest whole are summed over all ranks at once", "use zero1"
    if world_size % replicas:
        sizes = [str(k) for k in range(1, max(2, world_size)) if world_size % k == 0]
        return f"{world_size} ranks form no {replicas} equal groups", f"use {', '.join(sizes)}"
    if world_size == replicas and not differ:
        return "a group of one rank shards nothing: this is ddp", "use fewer replicas, or ddp"
    return None


def why_no_secondary_copy(num_ranks: int, stage: Stage, group_size: int) -> tuple[str, str] | None:
    """Return why nodes of so many ranks can keep no copy of parameters that `group_size` ranks shard, and what to do.

    None where they can.
    """
    if stage.gather is not Move.ALL_GATHER:
        return "parameters that rest whole are not gathered", "use zero3"
    sizes = [str(n) for n in range(2, group_size) if group_size % n == 0]
    if num_ranks >= group_size:
        return f"no gather leaves the {group_size} ranks that shard", "leave it out"
    if str(num_ranks) not in sizes:
        remedy = f"use {', '.join(sizes)}, of which it must divide a node's ranks"
        return f"{group_size} ranks form no equal nodes of it", remedy if sizes else "leave it out"
    return None
