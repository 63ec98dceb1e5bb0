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
from dataclasses import dataclass

MIB = 2**20
ROUND, SMALL, SMALL_PAGE, LARGE_PAGE = 512, MIB, 2 * MIB, 20 * MIB
OWN_SEGMENT, ROUND_SEGMENT = 10 * MIB, 2 * MIB
ADDRESSES = 2**60  # more bytes than any device has
CHUNK, LEFT_AT_START = 32 * MIB, (2 * MIB, 24 * MIB)  # [Note: addresses]

# The number of an allocation, its bytes from now on (0: it is freed), and the stream that allocates.
Change = tuple[int, int, Hashable]


class OutOfDeviceMemory(Exception):
    """Neither a free block nor the device, once it has got back what is free, holds a request."""


@dataclass(eq=False)
class Block:
    """Part of a segment, between its neighbours there."""

    pool: Pool
    address: int
    size: int
    allocated: bool = False
    mapped: bool = True  # False: addresses of an expandable segment without memory
    previous: Block | None = None
    next: Block | None = None

    @property
    def size_to_grow_to(self) -> int:
        return self.size + (self.next.size if self.next and not self.next.mapped else 0)

    def split(self, size: int) -> Block:
        """Cut after `size` bytes, and return the rest."""
        rest = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.previous, rest.next, self.next, self.size = self, self.next, rest, size
        if rest.next:
            rest.next.previous = rest
        return rest

    def put_back(self) -> None:
        """Go among the blocks of the pool that are not allocated, with free neighbours that are mapped as this one."""
        self.allocated = False
        for other in (self.previous, self.next):
            if other and not other.allocated and other.mapped == self.mapped:
                self.pool.remove(other)
                first, last = (other, self) if other is self.previous else (self, other)
                self.address, self.size = first.address, self.size + other.size
                self.previous, self.next = first.previous, last.next
                if self.previous:
                    self.previous.next = self
                if self.next:
                    self.next.previous = self
        self.pool.add(self)


class Pool:
    """The blocks that are not allocated of one stream's small or large requests."""

    def __init__(self, is_small: bool) -> None:
        self.page = SMALL_PAGE if is_small else LARGE_PAGE
        self.free: list[tuple[int, int, Block]] = []  # by size, then address
        self.unmapped: list[tuple[int, int, Block]] = []  # by address
        self.add(Block(self, 0, ADDRESSES, mapped=False))

    def add(self, block: Block) -> None:
        entries, key = self._place(block)
        insort(entries, (*key, block))

    def remove(self, block: Block) -> None:
        entries, key = self._place(block)
        del entries[bisect_left(entries, key)]

    def _place(self, block: Block) -> tuple[list[tuple[int, int, Block]], tuple[int, int]]:
        if block.mapped:
            return self.free, (block.size, block.address)
        return self.unmapped, (0, block.address)

    def take_free(self, size: int, *, expandable: bool) -> Block | None:
        """Return the smallest free block; one at the end of what is mapped counts as all that it can grow to."""
        at = bisect_left(self.free, (size, 0))
        if at == len(self.free):
            return None
        while expandable and at + 1 < len(self.free):
            if self.free[at + 1][2].size_to_grow_to >= self.free[at][2].size_to_grow_to:
                break
            at += 1
        return self.free.pop(at)[2]

    def lowest_room(self, size: int) -> Block:
        """Return the first block, free or unmapped, from which on there are so many addresses."""
        for _, _, block in self.unmapped:
            before = block.previous
            start = before if before and not before.allocated else block
            room, after = 0, start
            while after and not after.allocated and room < size:
                room, after = room + after.size, after.next
            if room >= size:
                return start
        raise AssertionError("the last block has room for all")


class CachingAllocator:
    """The allocator of one device. `limit`: bytes that it can reserve; None: any number."""

    def __init__(self, *, expandable: bool, limit: int | None = None) -> None:
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
        block = pool.take_free(size, expandable=self.expandable) or ask(pool, size)
        if block is None:
            self._give_back_free()
            self.num_retries += 1
            block = ask(pool, size)
        if block is None:
            raise OutOfDeviceMemory(f"{size:,} bytes beside {self.reserved_bytes:,} reserved")
        rest = block.size - size
        if rest >= ROUND if is_small or self.expandable else rest > SMALL:
            pool.add(block.split(size))
        block.allocated = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
        block.put_back()

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        segment = pool.page if size < OWN_SEGMENT else _rounded(size, ROUND_SEGMENT)
        if not self._reserve(segment):
            return None
        return Block(pool, self._address(segment), segment)

    def _address(self, size: int) -> int:
        """Return where the driver puts a segment, see [Note: addresses]."""
        at = next((at for at, (_, left) in enumerate(self._left) if left >= size), None)
        if at is None:
            chunk = _rounded(size, CHUNK)
            self._lowest -= chunk
            self._left.insert(0, (self._lowest, chunk))
            at = 0
        address, left = self._left[at]
        self._left[at] = address + size, left - size
        return address

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Map pages at the lowest addresses where there is room, beside free blocks."""
        block = pool.lowest_room(size)
        while not block.mapped or block.size < size:
            unmapped = block.next if block.mapped else block
            assert unmapped is not None
            missing = size - (block.size if block.mapped else 0)
            pages = min(_rounded(missing, pool.page), unmapped.size)
            if not self._reserve(pages):
                return None
            pool.remove(unmapped)
            if pages < unmapped.size:
                pool.add(unmapped.split(pages))
            unmapped.mapped = True
            unmapped.put_back()
            block = unmapped
        pool.remove(block)
        return block

    def _reserve(self, num_bytes: int) -> bool:
        if self.limit is not None and self.reserved_bytes + num_bytes > self.limit:
            return False
        self.reserved_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        return True

    def _give_back_free(self) -> None:
        give_back = self._unmap if self.expandable else self._free_segment
        for block in [block for pool in self._pools.values() for _, _, block in pool.free]:
            give_back(block)

    def _free_segment(self, block: Block) -> None:
        """Give back the segment of a free block that is all of it."""
        if not block.previous and not block.next:
            block.pool.remove(block)
            self.reserved_bytes -= block.size

    def _unmap(self, block: Block) -> None:
        """Give back the pages of a free block that are free as a whole."""
        pool, page = block.pool, block.pool.page
        start, end = _rounded(block.address, page), (block.address + block.size) // page * page
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            before, block = block, block.split(start - block.address)
            pool.add(before)
        if end < block.address + block.size:
            pool.add(block.split(end - start))
        self.reserved_bytes -= block.size
        block.mapped = False
        block.put_back()


def _rounded(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def replay(
    *parts: Iterable[Change], expandable: bool, limit: int | None = None
) -> CachingAllocator:
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
    """Whether ranks with this environment have expandable segments."""
    words = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings = dict(word.split(":", 1) for word in words.replace(" ", "").split(",") if ":" in word)
    return settings.get("expandable_segments") == "True"
