"""Where parameters, gradients and optimizer state rest, and which move takes a thing to where it is needed.

A ZeRO stage is a row of three placements. Everything a stage *does* is derived from its row by `move`:

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


class Placement(Enum):
    REPLICATE = "replicate"  # every rank holds the same whole
    PARTIAL = "partial"  # every rank holds a whole summand; the value is their sum
    SHARD = "shard"  # every rank holds its own piece of the one value


class Move(Enum):
    """What it takes to go from one placement to another."""

    NOTHING = "nothing"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    SLICE = "slice"  # local: keep my piece, drop the rest


_MOVES = {
    (Placement.SHARD, Placement.REPLICATE): Move.ALL_GATHER,
    (Placement.PARTIAL, Placement.SHARD): Move.REDUCE_SCATTER,
    (Placement.PARTIAL, Placement.REPLICATE): Move.ALL_REDUCE,
    (Placement.REPLICATE, Placement.SHARD): Move.SLICE,
}


def move(now: Placement, needed: Placement) -> Move:
    """The move from `now` to `needed`; a value can not become partial again."""
    if now is needed:
        return Move.NOTHING
    if (now, needed) not in _MOVES:
        raise ValueError(f"no move leads from {now.value} to {needed.value}")
    return _MOVES[now, needed]


def reduce_each(gradients: str) -> str:
    """The default of that setting, from the placement of gradients: whole ones would need the memory of all of them."""
    return "microbatch" if gradients == Placement.SHARD.value else "step"


@dataclass(frozen=True)
class Stage:
    """One row: where parameters (P), gradients (G) and optimizer state (O) rest between uses."""

    parameters: Placement
    gradients: Placement
    optimizer: Placement

    @classmethod
    def of(cls, parameters: str, gradients: str, optimizer: str) -> Stage:
        """From the words of the config; a row without meaning is refused with the ones that have one."""
        stage = cls(Placement(parameters), Placement(gradients), Placement(optimizer))
        if stage not in STAGES.values():
            known = "; ".join(f"{name} = {row}" for name, row in STAGES.items())
            raise ValueError(f"strategy placements={stage}: no such stage, use one of {known}")
        return stage

    def __str__(self) -> str:
        return f"{self.parameters.value},{self.gradients.value},{self.optimizer.value}"

    @property
    def reduce_each(self) -> str:
        """When accumulated gradients are reduced if nobody says: `microbatch` where they rest sharded, else `step`."""
        return reduce_each(self.gradients.value)

    @property
    def gather(self) -> Move:
        return move(self.parameters, Placement.REPLICATE)

    @property
    def reduce(self) -> Move:
        return move(Placement.PARTIAL, self.gradients)

    @property
    def hand_over(self) -> Move:
        return move(self.gradients, self.optimizer)

    @property
    def publish(self) -> Move:
        return move(self.optimizer, self.parameters)


_R, _P, _S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD

STAGES = {
    "ddp": Stage(_R, _R, _R),
    "zero1_allreduce": Stage(_R, _R, _S),  # the lazy ZeRO-1 of the tutorials: 3P on the wire
    "zero1": Stage(_R, _P, _S),
    "zero2": Stage(_R, _S, _S),
    "zero3": Stage(_S, _S, _S),
}
