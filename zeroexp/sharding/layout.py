"""A layout cuts parameters in pieces and says which rank owns which element. It is pure arithmetic, without torch.

The three families differ only in how they form *chunks*; everything else works on chunks:

    by_parameter    one chunk a unit, members ordered by owner, cut at the borders of whole parameters
    by_tensor       one chunk a parameter, cut evenly
    by_buffer       one chunk a unit, cut evenly across the borders of parameters

This is a chunk of three members (a: 4, b: 3, c: 3 elements) on 4 ranks, by_buffer:

        element   0 1 2 3 4 5 6 7 8 9 . .      cuts = (0, 3, 6, 9, 12); '.' is padding, always zero
        member    a a a a b b b c c c
        rank      0 0 0 1 1 1 2 2 2 3 3 3      rank 1 owns the spans a[3:4] and b[0:2]
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from zeroexp.registry import Registry

FROZEN = "frozen"  # the kind of parameters that get no gradient
ALIGNMENT_BYTES = 64  # alignment of chunks that lie side by side in one memory
PAGE_BYTES = mmap.PAGESIZE  # 4 KiB on most machines, 16 or 64 KiB on others
# A chunk of at least this many pages per rank is cut on page borders, so that a section can be mapped (stitching.py).
# That pads the chunk by less than a hundredth.
LARGE_PAGES = 128


@dataclass(frozen=True)
class ParameterSpec:
    name: str
    numel: int
    itemsize: int  # bytes of one element
    kind: str = ""  # dtype and trainability, which all parameters of one chunk share


@dataclass(frozen=True)
class Member:
    """A member is a parameter inside a chunk: it fills the elements [start, stop) of the chunk."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Span:
    """A span is the elements [start, stop) of a flattened member; it lies at `offset` in its owner's piece."""

    member: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """A chunk is what one collective moves: members side by side, then padding; rank r owns cuts[r]:cuts[r+1]."""

    members: tuple[Member, ...]
    cuts: tuple[int, ...]
    kind: str = ""
    page_bytes: int = PAGE_BYTES  # page size of the machines the chunk was cut for

    @property
    def numel(self) -> int:
        """Number of real elements, without padding."""
        return self.members[-1].stop

    @property
    def padded_numel(self) -> int:
        return self.cuts[-1]

    @property
    def even(self) -> bool:
        """Whether every rank owns equally many elements, so that collectives of even sections apply."""
        return len({b - a for a, b in zip(self.cuts, self.cuts[1:], strict=False)}) == 1

    def section(self, rank: int) -> slice:
        """Return the elements of the chunk that `rank` owns, padding included."""
        return slice(self.cuts[rank], self.cuts[rank + 1])

    def section_numel(self, rank: int) -> int:
        """Return the number of elements that `rank` owns, padding included."""
        return self.cuts[rank + 1] - self.cuts[rank]

    def real_section(self, rank: int) -> slice:
        """Return the elements of the chunk that `rank` owns, without padding."""
        start, stop = self.cuts[rank], self.cuts[rank + 1]
        return slice(min(start, self.numel), min(stop, self.numel))

    def lies_on_pages(self, rank: int, itemsize: int) -> bool:
        """Tell whether the elements that `rank` owns fill whole pages of the chunk's memory."""
        start, stop = self.cuts[rank] * itemsize, self.cuts[rank + 1] * itemsize
        return start < stop and start % self.page_bytes == 0 == stop % self.page_bytes

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return, in order, the parts of members that `rank` owns; padding belongs to no span."""
        return self._spans_by_rank[rank]

    def whole(self) -> tuple[Span, ...]:
        """Return a span for each whole member, as a rank owns it where nothing is sharded; `offset` is in the chunk."""
        return tuple(Span(i, 0, m.stop - m.start, m.start) for i, m in enumerate(self.members))

    @cached_property
    def _spans_by_rank(self) -> tuple[tuple[Span, ...], ...]:
        return tuple(self._cut(rank) for rank in range(len(self.cuts) - 1))

    def _cut(self, rank: int) -> tuple[Span, ...]:
        low, high = self.cuts[rank], self.cuts[rank + 1]
        spans: list[Span] = []
        for index, member in enumerate(self.members):
            start, stop = max(low, member.start), min(high, member.stop)
            if start < stop:
                spans.append(Span(index, start - member.start, stop - member.start, start - low))
        return tuple(spans)


Units = Sequence[Sequence[ParameterSpec]]


def lay_out(
    family: str,
    units: Units,
    world_size: int,
    *,
    owners: str = "greedy",
    page_bytes: int = PAGE_BYTES,
) -> list[tuple[Chunk, ...]]:
    """Return the chunks of every unit.

    family: a word of LAYOUTS.
    owners: a word of OWNERS; only layouts that keep parameters whole read it.
    page_bytes: the largest page size among the machines, since all ranks must cut alike.
    """
    layout = LAYOUTS[family]
    if layout.has_owners:
        owner_of = OWNERS[owners]([spec for unit in units for spec in unit], world_size)
        return [layout.cut(unit, world_size, owner_of, page_bytes) for unit in units]
    return [layout.cut(unit, world_size, page_bytes) for unit in units]


def by_buffer(
    unit: Sequence[ParameterSpec], world_size: int, page_bytes: int = PAGE_BYTES
) -> tuple[Chunk, ...]:
    """Make one evenly cut chunk for each kind of parameter in the unit."""
    return tuple(_even_chunk(specs, world_size, page_bytes) for specs in _by_kind(unit))


def by_tensor(
    unit: Sequence[ParameterSpec], world_size: int, page_bytes: int = PAGE_BYTES
) -> tuple[Chunk, ...]:
    """Make one evenly cut chunk for each parameter."""
    return tuple(_even_chunk([spec], world_size, page_bytes) for spec in unit)


def by_parameter(
    unit: Sequence[ParameterSpec],
    world_size: int,
    owner_of: dict[str, int],
    page_bytes: int = PAGE_BYTES,
) -> tuple[Chunk, ...]:
    """Make one chunk for each kind and sort its members by owner; a rank may own nothing of a chunk."""
    chunks: list[Chunk] = []
    for specs in _by_kind(unit):
        ordered = sorted(specs, key=lambda spec: owner_of[spec.name])
        sizes = [0] * world_size
        for spec in ordered:
            sizes[owner_of[spec.name]] += spec.numel
        cuts = (0, *accumulate(sizes))
        chunks.append(Chunk(_side_by_side(ordered), cuts, specs[0].kind, page_bytes))
    return tuple(chunks)


def own_contiguously(specs: Sequence[ParameterSpec], world_size: int) -> dict[str, int]:
    """Give each rank equally many consecutive parameters, whatever their size: the reference's rule, and its skew."""
    per_rank = -(-len(specs) // world_size)
    return {spec.name: index // per_rank for index, spec in enumerate(specs)}


def own_greedily(specs: Sequence[ParameterSpec], world_size: int) -> dict[str, int]:
    """Give the least loaded rank the largest parameter left (longest processing time); never worse than contiguous."""
    owner_of: dict[str, int] = {}
    load = [0] * world_size
    for spec in sorted(specs, key=lambda spec: -spec.numel * spec.itemsize):
        rank = load.index(min(load))
        owner_of[spec.name] = rank
        load[rank] += spec.numel * spec.itemsize
    contiguous = own_contiguously(specs, world_size)
    return owner_of if max(load) <= fullest_bytes(specs, contiguous) else contiguous


def fullest_bytes(specs: Sequence[ParameterSpec], owner_of: dict[str, int]) -> int:
    """Return the bytes that the fullest rank owns."""
    load: dict[int, int] = {}
    for spec in specs:
        owner = owner_of[spec.name]
        load[owner] = load.get(owner, 0) + spec.numel * spec.itemsize
    return max(load.values(), default=0)


@dataclass(frozen=True)
class Layout:
    """A way of cutting. `cut` takes a unit's parameters, the world size and a page's bytes, and returns its chunks.

    has_owners: parameters stay whole. Then `cut` takes, before the bytes, which rank owns which parameter.
    """

    cut: Callable[..., tuple[Chunk, ...]]
    has_owners: bool = False


LAYOUTS = Registry(
    "strategy.implementation",
    "zeroexp.layouts",
    {
        "parameter": Layout(by_parameter, has_owners=True),
        "tensor": Layout(by_tensor),
        "buffer": Layout(by_buffer),
    },
    needs="a Layout(cut=function)",
    fits=lambda value: isinstance(value, Layout),
)

OwnersRule = Callable[[Sequence[ParameterSpec], int], dict[str, int]]
_OWNERS: dict[str, OwnersRule] = {"contiguous": own_contiguously, "greedy": own_greedily}
OWNERS = Registry("strategy.owners", "zeroexp.owners", _OWNERS, needs="a function")


def _even_chunk(specs: Sequence[ParameterSpec], world_size: int, page_bytes: int) -> Chunk:
    """Decide the padding: a chunk grows to the next multiple of the world size, a large one to whole pages per rank."""
    step = cut_elements(page_bytes)
    members = _side_by_side(specs)
    per_rank = -(-members[-1].stop // world_size)
    if per_rank >= LARGE_PAGES * step:
        per_rank = -(-per_rank // step) * step
    cuts = tuple(per_rank * rank for rank in range(world_size + 1))
    return Chunk(members, cuts, specs[0].kind, page_bytes)


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


def cut_elements(page_bytes: int) -> int:
    """Return a number of elements that fills whole pages in every dtype of two or more bytes."""
    return page_bytes // 2


def pages(num_bytes: int, page_bytes: int = PAGE_BYTES) -> int:
    """Round `num_bytes` up to whole pages."""
    return -(-num_bytes // page_bytes) * page_bytes


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
