"""Dtypes and options of an engine: what a tensor is stored as, and how a stage is carried out.

What the options leave open follows from transport and stage (`Options.resolved`).

[Note: world of one] The piece of a single rank is the whole, and its own gradient is the sum. So one rank carries out
every stage as ddp, unless its pieces are on the host: it gathers, reduces and publishes nothing, gradients stay where
autograd left them (`ChunkGradients.owned`), and its modules run without hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from zeroexp.comm.traits import MIB, MoveOptions, TransportTraits
from zeroexp.cut.chunk import FROZEN, Chunk
from zeroexp.cut.layout import Units, lay_out, place_on_host
from zeroexp.cut.stage import STAGES, Placement, Stage, default_reduce_each

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Dtypes:
    """The three dtypes of the strategy's table."""

    compute: torch.dtype  # dtype of parameters and of the gradients autograd makes
    # dtype of gradients on the wire, of sums of microbatches, and of what reduction leaves
    reduce: torch.dtype
    master: torch.dtype  # dtype of the weights the optimizer updates
    # `master` of chunks of a kind with its own
    of_kinds: tuple[tuple[str, torch.dtype], ...] = field(default=(), kw_only=True)
    # `compute` of modules with their own, by name: each is a unit, see zero/casts.py
    of_modules: Mapping[str, torch.dtype] = field(
        default_factory=dict[str, torch.dtype], kw_only=True
    )

    def master_of(self, chunk: Chunk) -> torch.dtype:
        return dict(self.of_kinds).get(chunk.kind, self.master)

    def of_unit(self, name: str) -> Dtypes:
        return replace(self, compute=self.of_modules.get(name, self.compute))

    def with_masters_of(self, param_groups: Sequence[dict[str, Any]]) -> Dtypes:
        """Return these with the masters that groups name."""
        named = {g["kind"]: DTYPES[g["master"]] for g in param_groups if "master" in g}
        return replace(self, of_kinds=tuple(named.items()))


def own_dtypes(module: nn.Module) -> Dtypes:
    """Return the model's own dtype for all uses; ValueError if its parameters have several."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) > 1:
        listed = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(
            f"parameters of {listed}: say what they are to become with dtypes=Dtypes(...)"
        )
    dtype = dtypes.pop() if dtypes else torch.float32
    return Dtypes(dtype, dtype, dtype)


@dataclass(frozen=True)
class OuterOptimizer:
    """Seldom synchronised replicas (outer.py): each takes `every` steps by itself, then an outer optimizer joins them.

    The outer optimizer is SGD with Nesterov momentum on what the replicas changed, with DiLoCo's defaults; lr=1 and
    momentum=0 average the weights.
    """

    every: int
    lr: float = 0.7
    momentum: float = 0.9

    def __str__(self) -> str:
        steps = "step" if self.every == 1 else f"{self.every} steps"
        return f"every {steps}, lr {self.lr:g}, momentum {self.momentum:g}"


@dataclass(frozen=True)
class Options(MoveOptions):
    """How the engine carries out a stage; no option but codecs, error_feedback and outer changes what is computed."""

    layout: str = "buffer"  # a word of LAYOUTS
    owners: str = "greedy"  # a word of OWNERS, where the layout keeps parameters whole
    unit: str = "block"  # model | block | layer | module
    overlap: bool = True
    prefetch: int | None = None  # units gathered ahead; None: 1, or 0 where that gains nothing
    keep: str = "last"  # units that stay gathered till backward: none | last (the root) | all
    reduce_each: str | None = None  # microbatch | step; None: see default_reduce_each
    # Updated parameters that rest replicated arrive until the end of the `step`, or until `forward` uses them.
    publish: str = "step"  # step | forward
    bucket_mb: float | None = None  # most MiB of one reduction; None: the transport's default
    # Ranks over which replicas shard masters and what the optimizer keeps: `group`, each its own; `all` of them.
    optimizer_over: str = "group"
    over_of_kinds: tuple[tuple[str, str], ...] = ()  # that of parameters of a kind with its own
    # Replicas differ between outer steps; None: each step sums over all.
    outer: OuterOptimizer | None = None
    # How an optimizer of whole matrices steps cut ones: a word of MATRIX_STEPS (cut/matrix_step.py).
    matrix_step: str = "alltoall"

    def with_optimizer_over_of(self, param_groups: Sequence[dict[str, Any]]) -> Options:
        """Return these with the ranks that groups name."""
        named = {g.get("kind", ""): g["over"] for g in param_groups if "over" in g}
        return replace(self, over_of_kinds=tuple(named.items()))

    @property
    def shares_updates(self) -> bool:
        """Whether replicas update shares of anything."""
        overs = (self.optimizer_over, *dict(self.over_of_kinds).values())
        return self.replicas > 1 and "all" in overs

    @property
    def sums_each_step(self) -> bool:
        return self.outer is None

    def stage_for(self, stage: Stage, world_size: int) -> Stage:
        """Return the stage that these ranks carry out, see [Note: world of one]."""
        is_alone = self.grid(world_size).group_size == 1
        return STAGES["ddp"] if is_alone and not self.pieces_on_host else stage

    def lay_out(self, units: Units, world_size: int) -> list[tuple[Chunk, ...]]:
        """Return the chunks of every unit, each cut for the ranks that update it, and marked by where it rests."""
        group_size = self.grid(world_size).group_size
        num_updating = world_size if self.shares_updates else group_size
        layout = [
            tuple(self._merge_cuts(chunk, group_size) for chunk in chunks)
            for chunks in lay_out(self.layout, units, num_updating, owners=self.owners)
        ]
        if self.offload is None:
            return layout
        return place_on_host(layout, self.offload_fraction, frozen=self.pieces_on_host)

    def _merge_cuts(self, chunk: Chunk, group_size: int) -> Chunk:
        """Return the chunk cut for the ranks of a group, or still for all where replicas share its optimizer."""
        over = dict(self.over_of_kinds).get(chunk.kind, self.optimizer_over)
        if self.shares_updates and over == "all" and chunk.kind != FROZEN:
            return replace(chunk, over_all=True)
        return chunk.for_ranks(group_size)

    def resolved(self, stage: Stage, traits: TransportTraits, world_size: int) -> Options:
        """Return these with the value for each open option that is best for this stage over this transport."""
        bucket_mb = self.bucket_mb
        if bucket_mb is None and traits.bucket_bytes is not None and world_size > 1:
            bucket_mb = traits.bucket_bytes / MIB
        # Where the gathering rank copies by itself, gathering ahead gains nothing and costs memory.
        prefetch = int(not traits.moves_on_wait) if self.prefetch is None else self.prefetch
        return replace(
            self,
            bucket_mb=bucket_mb,
            prefetch=prefetch if self.overlap else 0,
            publish="step" if traits.moves_on_wait else self.publish,  # likewise
            reduce_each=self.reduce_each or default_reduce_each(stage.gradients.value),
        )

    @property
    def bucket_bytes(self) -> int | None:
        """The most bytes of one reduction; None: a whole unit."""
        return None if self.bucket_mb is None else int(self.bucket_mb * MIB)

    def as_record(
        self, stage: Stage, traits: TransportTraits, between: TransportTraits | None
    ) -> dict[str, Any]:
        """Return what a run writes down of resolved ones; None: not applicable. `between`: of sums between replicas."""
        sharded = stage.parameters is Placement.SHARD
        replicas: dict[str, Any] = {}
        if between is not None:
            replicas = {"replicas": self.replicas, "transport_between_replicas": between.name}
            replicas["optimizer_over"] = self.optimizer_over
        if self.outer is not None:
            replicas["outer"] = f"{self.outer}, by design not equal to one process"
        return {
            **replicas,
            "transport": traits.name,
            "bucket_mb": None if self.bucket_bytes is None else self.bucket_bytes / MIB,
            "prefetch": self.prefetch if sharded else None,
            "reduce_each": self.reduce_each,
            "reductions_in_flight": traits.reductions_in_flight if self.overlap else 0,
        }
