"""A placement says where a tensor rests, and a move takes it to where it is needed.

A ZeRO stage is a row of three placements: parameters, gradients, optimizer state. `move_between` derives from that row
everything that the stage *does*:

    verb        when                        change                zero1     zero2     zero3
    gather      before forward, backward    P -> replicate        -         -         all-gather
    free        after forward, backward     replicate -> P        -         -         drop
    reduce      gradients ready             partial -> G          -         red.-sc.  red.-sc.
    hand_over   before the optimizer step   G -> O                red.-sc.  -         -
    publish     after the optimizer step    O -> P                all-gath. all-gath. -
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeroexp.registry import Registry


class Placement(Enum):
    REPLICATE = "replicate"  # every rank holds the same whole value
    PARTIAL = "partial"  # every rank holds a whole summand; the value is their sum
    SHARD = "shard"  # every rank holds its own piece of the one value


class Move(Enum):
    """A move takes a tensor from one placement to another."""

    NOTHING = "nothing"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    SLICE = "slice"  # local: this rank keeps its piece and drops the rest


_MOVES = {
    (Placement.SHARD, Placement.REPLICATE): Move.ALL_GATHER,
    (Placement.PARTIAL, Placement.SHARD): Move.REDUCE_SCATTER,
    (Placement.PARTIAL, Placement.REPLICATE): Move.ALL_REDUCE,
    (Placement.REPLICATE, Placement.SHARD): Move.SLICE,
}


def move_between(now: Placement, needed: Placement) -> Move:
    """Return the move from `now` to `needed`; ValueError if none exists, since no value becomes partial again."""
    if now is needed:
        return Move.NOTHING
    if (now, needed) not in _MOVES:
        raise ValueError(f"no move leads from {now.value} to {needed.value}")
    return _MOVES[now, needed]


def default_reduce_each(gradients: str) -> str:
    """Return the default of the setting `reduce_each` for this placement of gradients.

    Where gradients rest sharded, each microbatch is reduced: whole gradients would need the memory of all of them.
    """
    return "microbatch" if gradients == Placement.SHARD.value else "step"


@dataclass(frozen=True)
class Stage:
    """A stage says where parameters (P), gradients (G) and optimizer state (O) rest between uses."""

    parameters: Placement
    gradients: Placement
    optimizer: Placement

    @classmethod
    def of(cls, parameters: str, gradients: str, optimizer: str) -> Stage:
        """Make a stage from the words of the config; a row that is no stage raises ValueError with all stages."""
        stage = cls(Placement(parameters), Placement(gradients), Placement(optimizer))
        if stage not in STAGES.values():
            stages = "; ".join(f"{name} = {row}" for name, row in STAGES.items())
            raise ValueError(f"strategy placements={stage}: no such stage, use one of {stages}")
        return stage

    def __str__(self) -> str:
        return f"{self.parameters.value},{self.gradients.value},{self.optimizer.value}"

    @property
    def gather(self) -> Move:
        return move_between(self.parameters, Placement.REPLICATE)

    @property
    def reduce(self) -> Move:
        return move_between(Placement.PARTIAL, self.gradients)

    @property
    def hand_over(self) -> Move:
        return move_between(self.gradients, self.optimizer)

    @property
    def summing_move(self) -> Move:
        """The move that sums gradients: in backward, or on the way to the optimizer where they rest partial."""
        return self.reduce if self.reduce is not Move.NOTHING else self.hand_over

    @property
    def publish(self) -> Move:
        return move_between(self.optimizer, self.parameters)


def is_stage(value: object) -> bool:
    """Tell whether a value is a stage that the engine carries out.

    Weights are no summands, and a rank that does not own all of the optimizer's state updates what it owns.
    """
    if not isinstance(value, Stage) or value.parameters is Placement.PARTIAL:
        return False
    whole = Placement.REPLICATE
    return value.optimizer is Placement.SHARD or value == Stage(whole, whole, whole)


_R, _P, _S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD

STAGES = Registry(
    "strategy",
    {
        "ddp": Stage(_R, _R, _R),
        "zero1_allreduce": Stage(_R, _R, _S),  # ZeRO-1 as tutorials write it: it sends 3P
        "zero1": Stage(_R, _P, _S),
        "zero2": Stage(_R, _S, _S),
        "zero3": Stage(_S, _S, _S),
    },
    needs="a Stage whose optimizer rests sharded and whose parameters are not partial",
    fits=is_stage,
)


def why_no_replicas(
    replicas: int, stage: Stage, world_size: int, *, differ: bool = False
) -> tuple[str, str] | None:
    """Return why a stage on these ranks can have no replicas, and what to do; None where it can.

    differ: the replicas are seldom synchronised, so that each may be a single rank.
    """
    if stage.optimizer is not Placement.SHARD:
        return "every rank is a replica already, nothing is sharded", "use zero1, zero2 or zero3"
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


def why_not_over_all(
    replicas: int, *, differ: bool = False, offload: str | None = None, masters_rest: bool = False
) -> tuple[str, str] | None:
    """Return why an optimizer can not rest over all ranks of so many replicas, and what to do; None where it can."""
    if replicas == 1:
        return "one group is all ranks", "set replicas, or leave it out"
    if differ:
        return "with `outer` each replica updates all of its weights", "use one of them"
    if masters_rest:
        return "pieces that rest are masters", "let parameters rest apart, in a dtype of their own"
    if offload == "all":
        return "pieces on the host are sent between no replicas", "use offload=optimizer"
    return None
