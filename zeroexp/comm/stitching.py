"""A gathered chunk in which this rank's section is its resting piece: one address range maps pages of two files.

    file of the pool     | section 0 | section 2 | section 3 |        others' sections, copied when gathered
    arena of rank 1      ... |  piece  | ...                          section 1, where it rests
    addresses            | section 0 |  piece  | section 2 | section 3 |

So a rank neither copies its own section when it gathers, nor holds it twice. The mapping is made once and stays, so
views of it remain valid. Sections must begin and end on pages (paging.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PROT_NONE, MAP_FIXED = 0, 0x10  # <sys/mman.h>; Python's mmap can not choose the address
FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Stretch:
    """A run of whole pages in a file."""

    file: int
    offset: int
    num_bytes: int


def stitch(stretches: Sequence[Stretch]) -> Tensor:
    """Map the stretches side by side, and return them as one uint8 tensor that reads and writes the files in place.

    The files may be closed afterwards.
    """
    total = sum(stretch.num_bytes for stretch in stretches)
    start = _map(None, total, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    memory = (ctypes.c_uint8 * total).from_address(start)
    weakref.finalize(memory, _c_library().munmap, ctypes.c_void_p(start), ctypes.c_size_t(total))
    both = mmap.PROT_READ | mmap.PROT_WRITE
    for stretch in stretches:
        flags = mmap.MAP_SHARED | MAP_FIXED
        _map(start, stretch.num_bytes, both, flags, stretch.file, stretch.offset)
        start += stretch.num_bytes
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map(
    address: int | None, num_bytes: int, protection: int, flags: int, file: int, offset: int
) -> int:
    function = _c_library().mmap
    number = ctypes.c_int
    # The last argument is off_t: a shorter integer would map a file of many gigabytes at a wrong place.
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    function.restype = ctypes.c_void_p
    mapped = function(address, num_bytes, protection, flags, file, offset)
    if mapped == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {num_bytes} bytes: {os.strerror(number)}")
    return mapped


def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
