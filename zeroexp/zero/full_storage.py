"""The storage of a unit's full parameters where these rest sharded: resized to nothing while they are freed, and back.

[Note: one storage] It is the same for the whole training and never replaced. So a view of it, such as backward makes of
what autograd saved (saved_views.py), is right again once the unit is gathered again. Where somebody else holds a view,
the bytes stay until that view is gone: reading it ends in no crash, and zero_safety/kept_views.py refuses to go on.
Neither assigning `.data` nor writing into the storage advances a parameter's version counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from zeroexp.comm.base import GatherPart
from zeroexp.comm.shared_memory_sizes import aligned
from zeroexp.zero.held import Held


class FullStorage:
    """The memory of the full parameters of one unit, its chunks one after the other."""

    def __init__(self, held: Sequence[Held], device: torch.device):
        """Place the chunks, whose parameters show nothing yet, and hold no bytes."""
        starts = list(accumulate((aligned(each.full_bytes) for each in held), initial=0))
        self.memory = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        for each, start in zip(held, starts, strict=False):
            each.place_in(self.memory[start : start + each.full_bytes])
        self.parts = [GatherPart(each.chunk, each.whole, each.piece) for each in held]
        self._held = held
        self._by_dtype = {each.whole.dtype: each.whole for each in held}
        self._own_uses = torch._C._storage_Use_Count(self.address)
        self.drop()

    def take_up(self) -> None:
        """Hold the bytes of all chunks."""
        self.memory.untyped_storage().resize_(self.memory.numel())

    def drop(self) -> None:
        """Hold no bytes, if nobody else has a view; of freed parameters only."""
        if not self.is_viewed:
            self.memory.untyped_storage().resize_(0)

    def view(
        self, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
    ) -> Tensor:
        """Return the view that begins `offset` elements of `dtype` after the storage's beginning."""
        whole = self._by_dtype.get(dtype)  # a view as another dtype costs two operations
        typed = self.memory.view(dtype) if whole is None else whole
        return typed.as_strided(size, stride, offset)

    @property
    def address(self) -> int:
        """The address by which torch knows the storage."""
        return self.memory.untyped_storage()._cdata

    @property
    def is_viewed(self) -> bool:
        """Whether anybody but the engine holds a view; asked while the parameters show nothing."""
        return torch._C._storage_Use_Count(self.address) > self._own_uses

    def own_views(self) -> Iterator[Tensor]:
        """Yield the engine's tensors over the storage."""
        yield self.memory
        for held, part in zip(self._held, self.parts, strict=True):
            yield from (held.whole, *held.views)
            if part.by_rank is not None:
                yield part.by_rank
