"""What a move between ranks takes and gives back, and what every transport can do.

[Note: parts] A move takes the parts of one unit or bucket together: they travel as one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroexp.comm.facts import Facts
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
    by_rank: Tensor | None = field(
        init=False
    )  # `full` with a row for each rank, where it is cut evenly

    def __post_init__(self) -> None:
        even, world_size = self.chunk.even, len(self.chunk.cuts) - 1
        self.by_rank = self.full.view(world_size, -1) if even else None


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


Sent = tuple[Pending, int]  # a move in flight, and the bytes this rank sends


class Transport(Protocol):
    """One way to carry the moves. `what` they are of is said in errors."""

    @property
    def facts(self) -> Facts:
        """Known after `meet`: some ranks may be on other hosts."""
        ...

    @property
    def page_bytes(self) -> int:
        """The largest pages among the ranks' machines, known after `meet`."""
        ...

    @property
    def staging_bytes(self) -> int:
        """Shared memory of gradients on their way to neighbours."""
        ...

    @property
    def shared_bytes(self) -> int:
        """All memory that neighbours map: outside of torch's allocator."""
        ...

    @property
    def issued(self) -> int | None:
        """A checksum below 2**32 of what was issued so far; None where ranks may issue different gathers."""
        ...

    def meet(self) -> None:
        """Find the ranks of this host. Called once, by all ranks."""
        ...

    def reserve(self, rest_bytes: int, slot_bytes: int) -> None:
        """Say once how much memory `empty` will be asked for, and how much the largest reduction sends."""
        ...

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for parameters at rest, from where peers can take it best."""
        ...

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Open file and offset in it of memory from `empty`; None where no file backs it."""
        ...

    def offer(self, parts: Sequence[GatherPart], offer: int | None) -> int:
        """My pieces of these parts will not change before `quiesce`. Returns what `all_gather` knows the offer by."""
        ...

    def all_gather(self, parts: Sequence[GatherPart], offer: int | None, what: str) -> Sent: ...
    def reduce_scatter(self, parts: Sequence[ReducePart], what: str) -> Sent: ...
    def all_reduce(self, parts: Sequence[ReducePart], what: str) -> Sent: ...
    def sum(self, value: Tensor, what: str) -> Pending:
        """The sum over ranks of a tiny tensor, in place."""
        ...

    def quiesce(self) -> None:
        """Afterwards what was offered may be overwritten: every peer has read what it was handed."""
        ...
