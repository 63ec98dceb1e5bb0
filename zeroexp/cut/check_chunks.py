"""A layout of others is refused if its chunks lose, double or misplace a parameter, which would train another model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

from zeroexp.cut.chunk import Chunk, ParameterSpec


class ChunkCheck:
    """The check of the chunks into which a layout of others cuts units."""

    def __init__(self, family: str, world_size: int) -> None:
        self.family, self.world_size = family, world_size

    def refuse(self, chunks: Any, unit: Sequence[ParameterSpec]) -> None:
        """Raise ValueError in one line unless the chunks hold each parameter of the unit once."""
        if not isinstance(chunks, tuple | list) or not all(isinstance(c, Chunk) for c in chunks):
            self._fail(f"cuts a unit into {chunks!r:.80}", "return a tuple of Chunk")
        left = {spec.name: spec for spec in unit}
        for chunk in chunks:
            self._require_members(chunk, left)
            self._require_cuts(chunk)
        if left:
            self._fail(f"loses {next(iter(left))}", "make one member of each parameter")

    def _require_members(self, chunk: Chunk, left: dict[str, ParameterSpec]) -> None:
        """Take the chunk's members out of those that are left."""
        end = 0
        for member in chunk.members:
            if (spec := left.pop(member.name, None)) is None:
                problem = f"holds {member.name} twice, or in a unit that does not have it"
                self._fail(problem, "make one member of each parameter")
            if (member.start, member.stop) != (end, end + spec.numel):
                problem = f"puts {member.name} at {member.start}:{member.stop}"
                remedy = f"put it at {end}:{end + spec.numel}, behind the member before it"
                self._fail(problem, remedy)
            if spec.kind != chunk.kind:
                problem = f"puts {member.name} ({spec.kind}) into a chunk of kind {chunk.kind!r}"
                self._fail(problem, "make a chunk for each kind, and give it that kind")
            end = member.stop

    def _require_cuts(self, chunk: Chunk) -> None:
        cuts, end = chunk.cuts, chunk.members[-1].stop if chunk.members else 0
        if not end:
            self._fail("makes a chunk without members", "leave it out")
        numbers = all(type(cut) is int for cut in cuts) and len(cuts) == self.world_size + 1
        rise = numbers and cuts[0] == 0 and all(one <= other for one, other in pairwise(cuts))
        if not rise or cuts[-1] < end:
            problem = f"cuts {end} elements for {self.world_size} ranks at {cuts!r:.80}"
            remedy = f"use {self.world_size + 1} whole numbers that rise from 0 to {end} or more"
            self._fail(problem, remedy)

    def _fail(self, problem: str, remedy: str) -> NoReturn:
        raise ValueError(f"strategy.implementation={self.family}: {problem}; {remedy}")
