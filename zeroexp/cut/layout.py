"""Layouts: units are cut into chunks, and each chunk is padded.

The three layouts differ only in how they form chunks (chunk.py draws one); everything else works on chunks:

    by_parameter    one chunk a unit, members ordered by owner, cut at the borders of whole parameters
    by_tensor       one chunk a parameter, cut evenly
    by_buffer       one chunk a unit, cut evenly across the borders of parameters
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zeroexp.cut.check_chunks import refuse_chunks
from zeroexp.cut.chunk import FROZEN, Chunk, Member, ParameterSpec
from zeroexp.cut.moment_blocks import BLOCK, is_blockwise
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

    name: a word of LAYOUTS, of parameters that have no layout of their own.
    owners: a word of OWNERS; only layouts that keep parameters whole read it.
    Raises ValueError, in one line, where a rule of others gives a parameter to no rank, or to two.
    """
    whole = [s for unit in units for s in unit if LAYOUTS[s.layout or name].has_owners]
    owner_of = assign_owners(owners, whole, world_size) if whole else {}
    laid_out: list[tuple[Chunk, ...]] = []
    for unit in units:
        chunks: list[Chunk] = []
        for word in dict.fromkeys(spec.layout or name for spec in unit):
            specs = [spec for spec in unit if (spec.layout or name) == word]
            rules = (owner_of,) if LAYOUTS[word].has_owners else ()
            cut = LAYOUTS[word].cut(specs, world_size, *rules)
            if word not in LAYOUTS.own:  # ours have a property test
                refuse_chunks(word, cut, specs, world_size)
            chunks.extend(cut)
        laid_out.append(tuple(chunks))
    return laid_out


def place_on_host(
    layout: Sequence[Sequence[Chunk]], share: float, *, frozen: bool
) -> list[tuple[Chunk, ...]]:
    """Return the chunks, those marked that rest on the host: whole ones, with at least this share of the elements.

    They are spread over the model: of each of its beginnings that share rests there. frozen: chunks that are not
    trained rest there too.
    """
    there = total = 0

    def placed(chunk: Chunk) -> Chunk:
        nonlocal there, total
        if chunk.kind == FROZEN and not frozen:
            return chunk
        total += chunk.unpadded_numel
        if there >= share * total:
            return chunk
        there += chunk.unpadded_numel
        return replace(chunk, on_host=True)

    return [tuple(placed(chunk) for chunk in chunks) for chunks in layout]


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
    if is_blockwise(kind):
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
