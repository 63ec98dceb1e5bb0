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
