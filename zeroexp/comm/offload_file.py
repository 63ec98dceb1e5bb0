"""A file that a rank uses as memory: the kernel keeps its pages while there is room, and else reads them again."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from weakref import finalize

import torch
from torch import Tensor

PAGE = mmap.ALLOCATIONGRANULARITY


class MappedFile:
    """A file without a name: it is gone when the process ends, however that ends."""

    def __init__(self, folder: str):
        self._folder, self._end = folder, 0
        try:
            self._file, name = tempfile.mkstemp(dir=folder)
            os.unlink(name)
        except OSError as error:
            raise self._refusal(error) from error
        finalize(self, os.close, self._file)
        self._taken: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return the next bytes of the file, which are zeros."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        pages = -(-num_bytes // PAGE) * PAGE
        try:  # a disk that is full when a page is written would end the process in a signal
            os.posix_fallocate(self._file, self._end, pages)
        except OSError as error:
            raise self._refusal(error) from error
        mapped = mmap.mmap(self._file, num_bytes, offset=self._end)
        self._end += pages
        self._taken.append(torch.frombuffer(mapped, dtype=torch.uint8))
        return self._taken[-1]

    def resident_bytes(self) -> int:
        """Return how much of the file lies in memory now."""
        mincore, num_pages = ctypes.CDLL(None).mincore, 0
        for taken in self._taken:
            pages = (ctypes.c_ubyte * -(-len(taken) // PAGE))()
            mincore(ctypes.c_void_p(taken.data_ptr()), ctypes.c_size_t(len(taken)), pages)
            num_pages += bytes(pages).count(1)
        return num_pages * PAGE

    def _refusal(self, error: OSError) -> ValueError:
        problem = f"options.offload_folder={self._folder}: {error.strerror}"
        return ValueError(f"{problem}; use a folder on a disk with more room")
