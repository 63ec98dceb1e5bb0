"""The options say how the engine carries out a stage; what they leave open is settled by transport and stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zeroexp.comm.collectives import TRANSPORTS
from zeroexp.comm.facts import Facts
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.owners import OWNERS
from zeroexp.cut.stage import Placement, Stage

MIB = 1 << 20
WORDS = {
    "family": LAYOUTS,
    "owners": OWNERS,
    "unit": ("model", "block", "module"),
    "keep": ("none", "last", "all"),
    "reduce_each": ("microbatch", "step", None),
    "transport": TRANSPORTS,
}


@dataclass(frozen=True)
class Options:
    """Options say how the engine carries out a stage; none of them changes what is computed."""

    family: str = "buffer"  # a word of LAYOUTS
    owners: str = "greedy"  # a word of OWNERS, where the layout keeps parameters whole
    unit: str = "block"  # model | block | module
    overlap: bool = True
    prefetch: int | None = None  # units gathered ahead; None: 1, or 0 where that gains nothing
    keep: str = "last"  # none | last | all: units that stay gathered between forward and backward
    reduce_each: str | None = None  # microbatch | step; None: what Stage.reduce_each says
    bucket_mb: float | None = None  # most MiB of one reduction; None: the transport's default
    transport: str = "auto"  # a word of comm.collectives.TRANSPORTS
    replicas: int = 1  # groups of ranks that each hold all states, sharded inside of the group


@dataclass(frozen=True)
class SettledOptions:
    """The options that may stay open, with the values they got."""

    prefetch: int
    reduce_each: str
    bucket_bytes: int | None  # the most bytes of one reduction; None: a whole unit

    def as_record(self, options: Options, stage: Stage, facts: Facts) -> dict[str, Any]:
        """Return what a run writes down of its engine; None: not applicable."""
        sharded = stage.parameters is Placement.SHARD
        return {
            "transport": facts.name,
            "bucket_mb": None if self.bucket_bytes is None else self.bucket_bytes / MIB,
            "prefetch": self.prefetch if sharded else None,
            "reduce_each": self.reduce_each,
            "reductions_in_flight": facts.reductions_in_flight if options.overlap else 0,
        }


def settle_options(options: Options, stage: Stage, facts: Facts, world_size: int) -> SettledOptions:
    """Give each open option the value that is best for this stage over this transport."""
    bucket_bytes = facts.bucket_bytes if world_size > 1 else None
    if options.bucket_mb is not None:
        bucket_bytes = int(options.bucket_mb * MIB)
    return SettledOptions(
        prefetch=_prefetch(options, facts),
        reduce_each=options.reduce_each or stage.reduce_each,
        bucket_bytes=bucket_bytes,
    )


def _prefetch(options: Options, facts: Facts) -> int:
    """Return how many units are gathered ahead.

    Without overlap, or where the gathering rank copies by itself, gathering ahead gains nothing and costs memory.
    """
    if not options.overlap:
        return 0
    if options.prefetch is None:
        return 0 if facts.moves_on_wait else 1
    return options.prefetch


def refuse_options(options: Options, stage: Stage) -> None:
    """Raise ValueError in one line that names the option, its value and what to use."""
    for key, words in WORDS.items():
        if getattr(options, key) not in words:
            raise ValueError(
                f"options.{key}={getattr(options, key)}: use {', '.join(map(str, words))}"
            )
    if not isinstance(options.overlap, bool):
        raise ValueError(f"options.overlap={options.overlap!r}: use True or False")
    depth = options.prefetch
    if depth is not None and not (isinstance(depth, int) and depth >= 0):
        raise ValueError(f"options.prefetch={depth!r}: use 0 or more units, or None")
    size = options.bucket_mb
    if size is not None and not (is_number(size) and size > 0):
        raise ValueError(f"options.bucket_mb={size!r}: use a size in MiB above 0, or None")
    if stage.gradients is Placement.PARTIAL and options.reduce_each == "microbatch":
        raise ValueError(
            "reduce_each=microbatch: gradients that rest partial are reduced once, use step or zero2"
        )


def refuse_replicas(replicas: int, stage: Stage, world_size: int) -> None:
    """Raise ValueError unless `world_size` ranks can form so many groups that shard."""
    if type(replicas) is not int or replicas < 1:
        raise ValueError(f"options.replicas={replicas!r}: use a number of groups, 1 or more")
    if replicas > 1 and (problem := why_no_replicas(replicas, stage, world_size)):
        raise ValueError(f"options.replicas={replicas}: {problem[0]}; {problem[1]}")


def why_no_replicas(replicas: int, stage: Stage, world_size: int) -> tuple[str, str] | None:
    """Return why a stage on these ranks can have no replicas, and what to do; None where it can."""
    if stage.optimizer is not Placement.SHARD:
        return "every rank is a replica already, nothing is sharded", "use zero1, zero2 or zero3"
    if world_size % replicas:
        sizes = [str(k) for k in range(1, world_size) if world_size % k == 0]
        return f"{world_size} ranks form no {replicas} equal groups", f"use {', '.join(sizes)}"
    if world_size == replicas:
        return "a group of one rank shards nothing: this is ddp", "use fewer replicas, or ddp"
    return None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
