"""How bytes lie in memory: aligned side by side, or on pages, so that another address range can map them.

All of this is arithmetic. Transports whose ranks map each other's memory ask the layout for sections of whole pages.
"""

from __future__ import annotations

import mmap

from zeroexp.cut.chunk import Chunk
from zeroexp.cut.layout import Rounding

ALIGNMENT_BYTES = 64  # alignment of chunks that lie side by side in one memory
PAGE_BYTES = mmap.PAGESIZE  # 4 KiB on most machines, 16 or 64 KiB on others
# A chunk of at least this many pages per rank is cut on page borders, which pads it by less than a hundredth.
LARGE_PAGES = 128


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def pages(num_bytes: int, page_bytes: int = PAGE_BYTES) -> int:
    """Round `num_bytes` up to whole pages."""
    return -(-num_bytes // page_bytes) * page_bytes


def rounding_to_pages(page_bytes: int) -> Rounding:
    """Return the rounding after which large sections fill whole pages in every dtype of two or more bytes."""
    step = page_bytes // 2
    return Rounding(step, LARGE_PAGES * step)


def lies_on_pages(chunk: Chunk, rank: int, itemsize: int, page_bytes: int = PAGE_BYTES) -> bool:
    """Tell whether the elements that `rank` owns fill whole pages of the chunk's memory."""
    start, stop = chunk.cuts[rank] * itemsize, chunk.cuts[rank + 1] * itemsize
    return start < stop and start % page_bytes == 0 == stop % page_bytes
