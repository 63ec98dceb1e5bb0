"""Layouts: units are cut into chunks, and each chunk is padded.

The three layouts differ only in how they form chunks (chunk.py draws one); everything else works on chunks:

    by_parameter    one chunk a unit, members ordered by owner, cut at the borders of whole parameters
    by_tensor       one chunk a parameter, cut evenly
    by_buffer       one chunk a unit, cut evenly across the borders of parameters
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zeroexp.cut.check_chunks import refuse_chunks
from zeroexp.cut.chunk import Chunk, Member, ParameterSpec
from zeroexp.cut.moment_blocks import BLOCK, is_in_blocks
from zeroexp.cut.owners import assign_owners
from zeroexp.registry import Registry

Units = Sequence[Sequence[ParameterSpec]]


def lay_out(
    name: str,
    units: Units,
    world_size: int,
    *,
    owners: str = "greedy",
) -> list[tuple[Chunk, ...]]:
    """Return the chunks of every unit.

    name: a word of LAYOUTS.
    owners: a word of OWNERS; only layouts that keep parameters whole read it.
    Raises ValueError, in one line, where a rule of others gives a parameter to no rank, or to two.
    """
    layout, rules = LAYOUTS[name], ()
    if layout.has_owners:
        rules = (assign_owners(owners, [spec for unit in units for spec in unit], world_size),)
    laid_out = [layout.cut(unit, world_size, *rules) for unit in units]
    if name not in LAYOUTS.own:  # ours have a property test
        for chunks, unit in zip(laid_out, units, strict=True):
            refuse_chunks(name, chunks, unit, world_size)
    return laid_out


def by_buffer(unit: Sequence[ParameterSpec], world_size: int) -> tuple[Chunk, ...]:
    """Make one evenly cut chunk for each kind of parameter in the unit."""
    return tuple(_even_chunk(specs, world_size) for specs in _by_kind(unit))


def by_tensor(unit: Sequence[ParameterSpec], world_size: int) -> tuple[Chunk, ...]:
    """Make one evenly cut chunk for each parameter."""
    return tuple(_even_chunk([spec], world_size) for spec in unit)


def by_parameter(
    unit: Sequence[ParameterSpec],
    world_size: int,
    owner_of: dict[str, int],
) -> tuple[Chunk, ...]:
    """Make one chunk for each kind and sort its members by owner; a rank may own nothing of a chunk."""
    chunks: list[Chunk] = []
    for specs in _by_kind(unit):
        ordered = sorted(specs, key=lambda spec: owner_of[spec.name])
        sizes = [0] * world_size
        for spec in ordered:
            sizes[owner_of[spec.name]] += spec.numel
        cuts = (0, *accumulate(sizes))
        chunks.append(Chunk(_side_by_side(ordered), cuts, specs[0].kind))
    return tuple(chunks)


@dataclass(frozen=True)
class Layout:
    """A way of cutting. `cut` takes a unit's parameters and the world size, and returns its chunks.

    has_owners: parameters stay whole. Then `cut` takes as well which rank owns which parameter.
    """

    cut: Callable[..., tuple[Chunk, ...]]
    has_owners: bool = False


LAYOUTS = Registry(
    "strategy.implementation",
    {
        "parameter": Layout(by_parameter, has_owners=True),
        "tensor": Layout(by_tensor),
        "buffer": Layout(by_buffer),
    },
    needs="a Layout(cut=function)",
    fits=lambda value: isinstance(value, Layout),
    arguments=lambda layout: {"cut": 3 if layout.has_owners else 2},
)


def _even_chunk(specs: Sequence[ParameterSpec], world_size: int) -> Chunk:
    """Decide the padding: a chunk grows to the next multiple of the world size.

    A cut through a block of moments moves to its beginning. Where sizes are multiples of blocks sections stay even.
    """
    members, kind = _side_by_side(specs), specs[0].kind
    per_rank = -(-members[-1].stop // world_size)
    cuts = [per_rank * rank for rank in range(world_size + 1)]
    if is_in_blocks(kind):
        inside = [(m, r) for m in members for r, cut in enumerate(cuts) if m.start < cut < m.stop]
        for member, rank in inside:
            cuts[rank] -= (cuts[rank] - member.start) % BLOCK
    return Chunk(members, tuple(cuts), kind)


def _side_by_side(specs: Sequence[ParameterSpec]) -> tuple[Member, ...]:
    members: list[Member] = []
    start = 0
    for spec in specs:
        members.append(Member(spec.name, start, start + spec.numel))
        start += spec.numel
    return tuple(members)


def _by_kind(unit: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    groups: dict[str, list[ParameterSpec]] = {}
    for spec in unit:
        groups.setdefault(spec.kind, []).append(spec)
    return list(groups.values())
