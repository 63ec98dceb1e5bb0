"""A control block is what a rank tells its neighbours in shared memory: only that rank writes it, and all may read it.

    steps ended | for each rank and slot: tag staged, where, tag read | for each exposure: step, entry | entries

    staged     the data for that rank under this tag begin here in a slot of my arena
    read       I have read your slot of this tag: it may be written again
    exposures  these tensors at rest in my arena may be read during this step; an entry lists where they lie
    ended      I no longer read your exposures of this many steps

It holds state and is no stream: a rank that looks late sees the latest words, and nothing can overflow. Its file is
sparse: only written pages take memory.

[Note: order of memory] A rank writes a word after the data the word describes, and reads data after their word, even on
processors that reorder memory accesses: no access moves across a lock that is taken and released twice.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from threading import Lock

MOST_SLOTS = 8
MOST_EXPOSURES = 1 << 17
MOST_ENTRIES = 1 << 22  # words of all entries together
WORD_BYTES = 8
_STAGED, _WHERE, _READ = range(3)
_lock = Lock()


def memory_fence() -> None:
    """See [Note: order of memory]."""
    with _lock:
        pass
    with _lock:
        pass


def _place(word: int, rank: int, slot: int) -> int:
    return 1 + 3 * (MOST_SLOTS * rank + slot) + word


class ControlBlock:
    """A neighbour's control block, which this rank reads."""

    def __init__(self, file: int, world_size: int, *, access: int = mmap.ACCESS_READ):
        self._first_exposure = 1 + 3 * MOST_SLOTS * world_size
        self._words = memoryview(mmap.mmap(file, 0, access=access)).cast("q")

    @property
    def num_ended_steps(self) -> int:
        return self._words[0]

    def find_staged(self, rank: int, tag: int) -> tuple[int, int] | None:
        """Return (slot, offset) of the data for `rank` under this tag; None as long as they are not staged."""
        for slot in range(MOST_SLOTS):
            if self._words[_place(_STAGED, rank, slot)] == tag:
                memory_fence()
                return slot, self._words[_place(_WHERE, rank, slot)]
        return None

    def tag_read(self, rank: int, slot: int) -> int:
        """Return the tag of the last data that the neighbour read in this slot of `rank`."""
        return self._words[_place(_READ, rank, slot)]

    def exposed_offsets(self, exposure: int, step: int) -> Sequence[int] | None:
        """Return the offsets of this exposure's tensors; None as long as the exposure is not one of this step."""
        start = self._first_exposure + 2 * exposure
        if self._words[start] != step:
            return None
        memory_fence()
        entry = self._words[start + 1]
        return self._words[entry + 1 : entry + 1 + self._words[entry]]


class OwnControlBlock(ControlBlock):
    """This rank's control block, which it writes."""

    def __init__(self, world_size: int):
        self.file = os.memfd_create("zeroexp-control")
        weakref.finalize(self, os.close, self.file)
        # Where the next entry begins.
        self._top = 1 + 3 * MOST_SLOTS * world_size + 2 * MOST_EXPOSURES
        os.ftruncate(self.file, WORD_BYTES * (self._top + MOST_ENTRIES))
        super().__init__(self.file, world_size, access=mmap.ACCESS_WRITE)
        self._have_entries: set[int] = set()  # exposures

    def post_ended_steps(self, num_steps: int) -> None:
        memory_fence()
        self._words[0] = num_steps

    def post_staged(self, rank: int, slot: int, tag: int, offset: int) -> None:
        self._words[_place(_WHERE, rank, slot)] = offset
        memory_fence()
        self._words[_place(_STAGED, rank, slot)] = tag

    def post_read(self, rank: int, slot: int, tag: int) -> None:
        memory_fence()
        self._words[_place(_READ, rank, slot)] = tag

    def post_exposed(self, exposure: int, step: int, offsets: list[int]) -> None:
        start = self._first_exposure + 2 * exposure
        if exposure >= MOST_EXPOSURES:
            raise ValueError(f"more than {MOST_EXPOSURES} units: set strategy.unit=block")
        if exposure not in self._have_entries:  # tensors at rest stay where they are
            self._words[start + 1] = self._write_entry(offsets)
            self._have_entries.add(exposure)
        memory_fence()
        self._words[start] = step

    def _write_entry(self, offsets: list[int]) -> int:
        entry, self._top = self._top, self._top + 1 + len(offsets)
        if self._top > len(self._words):
            raise ValueError(f"more than {MOST_ENTRIES} pieces on a rank: cut parameters by buffer")
        for place, word in enumerate([len(offsets), *offsets], entry):
            self._words[place] = word
        return entry
