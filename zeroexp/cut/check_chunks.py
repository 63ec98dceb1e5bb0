"""What is wrong with a layout of others: chunks that lose, double or misplace a parameter would train another model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from zeroexp.cut.chunk import Chunk, ParameterSpec
from zeroexp.cut.moment_blocks import BLOCK, is_blockwise

Problem = tuple[str, str]  # and its remedy


def refuse_chunks(layout: str, chunks: Any, unit: Sequence[ParameterSpec], world_size: int) -> None:
    """Raise ValueError in one line unless the chunks hold each parameter of the unit once."""
    for problem, remedy in _problems(chunks, unit, world_size):
        raise ValueError(f"strategy.implementation={layout}: {problem}; {remedy}")


def _problems(chunks: Any, unit: Sequence[ParameterSpec], world_size: int) -> Iterator[Problem]:
    if not isinstance(chunks, tuple | list) or not all(isinstance(c, Chunk) for c in chunks):
        yield f"cuts a unit into {chunks!r:.80}", "return a tuple of Chunk"
        return
    left = {spec.name: spec for spec in unit}
    for chunk in chunks:
        yield from _problems_of_members(chunk, left)
        yield from _problems_of_blocks(chunk)
        yield from _problems_of_cuts(chunk, world_size)
    for name in left:
        yield f"loses {name}", "make one member of each parameter"


def _problems_of_members(chunk: Chunk, left: dict[str, ParameterSpec]) -> Iterator[Problem]:
    """Take the chunk's members out of those that are left."""
    end = 0
    for member in chunk.members:
        if (spec := left.pop(member.name, None)) is None:
            problem = f"holds {member.name} twice, or in a unit that does not have it"
            yield problem, "make one member of each parameter"
            return
        if (member.start, member.stop) != (end, end + spec.numel):
            remedy = f"put it at {end}:{end + spec.numel}, behind the member before it"
            yield f"puts {member.name} at {member.start}:{member.stop}", remedy
        if spec.kind != chunk.kind:
            problem = f"puts {member.name} ({spec.kind}) into a chunk of kind {chunk.kind!r}"
            yield problem, "make a chunk for each kind, and give it that kind"
        end = member.stop


def _problems_of_blocks(chunk: Chunk) -> Iterator[Problem]:
    """Yield cuts through what shares a scale, which no rank could compute."""
    for member in chunk.members if is_blockwise(chunk.kind) else ():
        for cut in (cut for cut in chunk.cuts if member.start < cut < member.stop):
            if (cut - member.start) % BLOCK:
                problem = f"cuts {member.name} before element {cut - member.start}"
                yield problem, f"cut kind {chunk.kind!r} at multiples of {BLOCK} of a member"


def _problems_of_cuts(chunk: Chunk, world_size: int) -> Iterator[Problem]:
    cuts, end = chunk.cuts, chunk.members[-1].stop if chunk.members else 0
    if not end:
        yield "makes a chunk without members", "leave it out"
    numbers = all(type(cut) is int for cut in cuts) and len(cuts) == world_size + 1
    rise = numbers and cuts[0] == 0 and all(one <= other for one, other in pairwise(cuts))
    if not rise or cuts[-1] < end:
        problem = f"cuts {end} elements for {world_size} ranks at {cuts!r:.80}"
        yield problem, f"use {world_size + 1} whole numbers that rise from 0 to {end} or more"
