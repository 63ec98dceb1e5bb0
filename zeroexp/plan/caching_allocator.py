"""What torch's CUDA caching allocator reserves of the device while a program allocates and frees. No torch.

    replay(changes, expandable=False).peak_bytes

Requests are rounded to 512 bytes. Those of at most 1 MiB come from one pool, larger ones from another, and each stream
has its own two. A request takes the smallest free block that holds it, of equal ones the one at the lowest address;
what is over is split off and stays free, and a freed block joins its free neighbours. Where no block is large enough
the device is asked for more:

    request              default: a segment              expandable_segments:True: pages, at the end of the pool's one
    at most 1 MiB        2 MiB                           of 2 MiB
    less than 10 MiB     20 MiB                          of 20 MiB
    more                 rounded to 2 MiB                of 20 MiB
    a rest is split off  from 512 bytes in the small     from 512 bytes
                         pool, above 1 MiB in the large

A device that is full gets back the segments, or the pages, that are free as a whole: a retry, which stops all streams.
Only then is it out of memory. Other settings of PYTORCH_CUDA_ALLOC_CONF are not modelled.

[Note: addresses] Which of two equal blocks is lower depends on the driver. As an H200's (580.159) it gives out chunks
of 32 MiB or a multiple, each below the last; and first what is left of earlier ones, the lowest that holds the segment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Mapping
from math import inf
from typing import NamedTuple

MIB = 2**20
ROUND, SMALL, SMALL_PAGE, LARGE_PAGE = 512, MIB, 2 * MIB, 20 * MIB
OWN_SEGMENT, ROUND_SEGMENT = 10 * MIB, 2 * MIB
ADDRESSES = 2**60  # more bytes than any device has
CHUNK, LEFT_AT_START = 32 * MIB, (2 * MIB, 24 * MIB)  # [Note: addresses]

# The number of an allocation, its bytes from now on (0: it is freed), and the stream that allocates.
Change = tuple[int, int, Hashable]


class OutOfDeviceMemory(Exception):
    """Neither a free block nor the device, once it has got back what is free, holds a request."""


class Block(NamedTuple):
    """What a request has got: addresses of its pool."""

    pool: Pool
    address: int
    size: int


class Spans:
    """Spans of addresses, none of which touch: one that is added joins its neighbours."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}  # by address
        self.ordered: list[tuple[int, int]] = []  # (size, address)
        self._starts: dict[int, int] = {}  # by the address behind the span

    def add(self, address: int, size: int) -> None:
        if address in self._starts:
            address = self._starts[address]
            size += self.take(address)
        if address + size in self.sizes:
            size += self.take(address + size)
        self.sizes[address], self._starts[address + size] = size, address
        insort(self.ordered, (size, address))

    def take(self, address: int) -> int:
        """Take out the span at this address, and return its size."""
        size = self.sizes.pop(address)
        del self._starts[address + size]
        del self.ordered[bisect_left(self.ordered, (size, address))]
        return size

    def cut(self, address: int, size: int, after: int = 0) -> None:
        """Take `size` bytes out of the span at this address, behind its first `after`."""
        if rest := self.take(address) - after - size:
            self.add(address + after + size, rest)
        if after:
            self.add(address, after)

    def before(self, address: int) -> int:
        """Return where the span begins that ends at this address; this address if there is none."""
        return self._starts.get(address, address)


class Pool:
    """What is not allocated of one stream's small or large requests."""

    def __init__(self, is_small: bool) -> None:
        self.page = SMALL_PAGE if is_small else LARGE_PAGE
        self.free = Spans()
        self.unmapped = Spans()  # without memory: of an expandable segment, or given back
        self.unmapped.add(0, ADDRESSES)
        self.segments: dict[int, int] = {}  # others, by address

    def smallest_free(self, size: int, *, expandable: bool) -> int | None:
        """Return the address of the smallest free span; one before unmapped ones counts as all that it can grow to."""
        free = self.free.ordered

        def grown(at: int) -> int:
            span, address = free[at]
            return span + self.unmapped.sizes.get(address + span, 0)

        at = bisect_left(free, (size, 0))
        while expandable and at + 1 < len(free) and grown(at + 1) < grown(at):
            at += 1
        return free[at][1] if at < len(free) else None

    def lowest_room(self, size: int) -> int:
        """Return the first address, of a free or an unmapped span, from which on there are so many."""
        for unmapped in sorted(self.unmapped.sizes):
            start = self.free.before(unmapped)
            room = 0
            while room < size:
                span = self.free.sizes.get(start + room) or self.unmapped.sizes.get(start + room)
                if span is None:
                    break
                room += span
            else:
                return start
        raise AssertionError("the last span has room for all")


class CachingAllocator:
    """The allocator of one device. `limit`: bytes that it can reserve."""

    def __init__(self, *, expandable: bool, limit: float = inf) -> None:
        self.expandable, self.limit = expandable, limit
        self.allocated_bytes = self.peak_allocated_bytes = 0  # rounded
        self.reserved_bytes = self.peak_bytes = 0
        self.num_retries = 0
        self._pools: dict[tuple[bool, Hashable], Pool] = {}
        self._lowest = ADDRESSES  # of all chunks, see [Note: addresses]
        above = range(ADDRESSES, 2 * ADDRESSES, CHUNK)
        # What is left of chunks: address and bytes, the lowest first.
        self._left = [*zip(above, LEFT_AT_START, strict=False)]

    def allocate(self, num_bytes: int, stream: Hashable = None) -> Block:
        """Return the block of a request. Raises OutOfDeviceMemory."""
        size = _rounded(max(num_bytes, 1), ROUND)
        is_small = size <= SMALL
        if (is_small, stream) not in self._pools:
            self._pools[is_small, stream] = Pool(is_small)
        pool = self._pools[is_small, stream]
        ask = self._expand if self.expandable else self._new_segment
        address = pool.smallest_free(size, expandable=self.expandable)
        if address is None:
            address = ask(pool, size)
        if address is None:
            self._give_back_free()
            self.num_retries += 1
            address = ask(pool, size)
        if address is None:
            raise OutOfDeviceMemory(f"{size:,} bytes beside {self.reserved_bytes:,} reserved")
        rest = pool.free.sizes[address] - size
        if not (rest >= ROUND if is_small or self.expandable else rest > SMALL):
            size += rest
        pool.free.cut(address, size)
        self.allocated_bytes += size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return Block(pool, address, size)

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
        block.pool.free.add(block.address, block.size)

    def _new_segment(self, pool: Pool, size: int) -> int | None:
        """Return where the driver puts a segment, see [Note: addresses]; twice that, so that no two segments touch."""
        segment = pool.page if size < OWN_SEGMENT else _rounded(size, ROUND_SEGMENT)
        if not self._reserve(segment):
            return None
        at = next((at for at, (_, left) in enumerate(self._left) if left >= segment), None)
        if at is None:
            at, chunk = 0, _rounded(segment, CHUNK)
            self._lowest -= chunk
            self._left.insert(0, (self._lowest, chunk))
        address, left = self._left[at]
        self._left[at] = address + segment, left - segment
        pool.segments[2 * address] = segment
        pool.free.add(2 * address, segment)
        return 2 * address

    def _expand(self, pool: Pool, size: int) -> int | None:
        """Map pages at the lowest addresses where there is room, beside free spans."""
        start = pool.lowest_room(size)
        while (mapped := pool.free.sizes.get(start, 0)) < size:
            end = start + mapped
            pages = min(_rounded(size - mapped, pool.page), pool.unmapped.sizes[end])
            if not self._reserve(pages):
                return None
            pool.unmapped.cut(end, pages)
            pool.free.add(end, pages)
        return start

    def _reserve(self, num_bytes: int) -> bool:
        if self.reserved_bytes + num_bytes > self.limit:
            return False
        self.reserved_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        return True

    def _give_back_free(self) -> None:
        """Give back the segments, or the pages, that are free as a whole."""
        for pool in self._pools.values():
            for span in [*pool.free.sizes.items()]:
                self._give_back(pool, *span)

    def _give_back(self, pool: Pool, address: int, size: int) -> None:
        start, end = address, address + size
        if self.expandable:
            start, end = _rounded(start, pool.page), end // pool.page * pool.page
        elif pool.segments.get(address) != size:
            return
        if start < end:
            pool.free.cut(address, end - start, start - address)
            pool.unmapped.add(start, end - start)
            self.reserved_bytes -= end - start


def _rounded(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def replay(*parts: Iterable[Change], expandable: bool, limit: float = inf) -> CachingAllocator:
    """Return the allocator after all parts; it has the retries of the last. Raises OutOfDeviceMemory."""
    allocator = CachingAllocator(expandable=expandable, limit=limit)
    blocks: dict[int, Block] = {}
    for part in parts:
        allocator.num_retries = 0
        for key, num_bytes, stream in part:
            if key in blocks:
                allocator.free(blocks.pop(key))
            if num_bytes:
                blocks[key] = allocator.allocate(num_bytes, stream)
    return allocator


def expands_segments(environment: Mapping[str, str]) -> bool:
    words = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings = dict(word.split(":", 1) for word in words.replace(" ", "").split(",") if ":" in word)
    return settings.get("expandable_segments") == "True"
