"""What a move between ranks takes and gives back.

[Note: parts] A move takes the parts of one unit or bucket together: they travel as one collective. Padding is never
sent by the direct transport; the backend's own collectives send it, since the even primitives need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zeroexp.sharding.layout import Chunk


@dataclass
class GatherPart:
    """One chunk whose sections become one `full` flat tensor on every rank; `piece` is this rank's section.

    in_place: that section of `full` is the piece.
    """

    chunk: Chunk
    full: Tensor
    piece: Tensor
    in_place: bool = False


@dataclass
class ReducePart:
    """One chunk whose gradients are summed over ranks.

    gradients: a flat tensor for each member, in the dtype of the wire.
    out: a flat tensor for each span this rank owns; may be that very span of `gradients`.
    accumulate: add to `out` instead of overwriting it.
    """

    chunk: Chunk
    gradients: list[Tensor]
    out: list[Tensor] = field(default_factory=list)
    accumulate: bool = False


class Pending:
    """A move in flight. `wait` ends it, once: afterwards its results are where they were asked for."""

    def __init__(self, works: Sequence[Any], then: Callable[[], Pending | None] | None = None):
        self._works = works
        self._then = then

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        then, self._works, self._then = self._then, (), None
        follow = then() if then is not None else None
        if follow is not None:
            follow.wait()
