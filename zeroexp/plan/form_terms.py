"""What a closed form is made of: precision and optimizer of a point, and the elements that a rank holds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from zeroexp.cut.moment_blocks import INT8, ROW_BYTES, num_blocks

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PrecisionForm:
    compute: str = "float32"
    reduce: str = "float32"
    master: str = "float32"


@dataclass(frozen=True)
class OptimizerForm:
    """The optimizer's state: AdamW keeps two moments and a 4-byte step per tensor, SGD with momentum one moment."""

    num_moments: int = 2  # each as large as its master weight
    bytes_per_tensor: int = 4
    dtype: str | None = None  # of moments; None: the master's
    master: str | None = None  # of the weights it updates; None: the precision's
    of_kinds: tuple[tuple[str, OptimizerForm], ...] = ()  # that of chunks of another kind

    def num_bytes(self, held: HeldElements, itemsize: int) -> int:
        return sum(self._of(own)._bytes_of(own, itemsize) for own in held.parts)

    def master_bytes(self, held: HeldElements, itemsize: int, at_rest: int) -> int:
        """Return the bytes of master weights; those of the itemsize of parameters at rest are these."""
        sizes = [ITEMSIZE.get(self._of(own).master or "", itemsize) for own in held.parts]
        owned = zip(sizes, held.parts, strict=True)
        return sum(each * own.numel for each, own in owned if each != at_rest)

    def _of(self, own: Owned) -> OptimizerForm:
        return dict(self.of_kinds).get(own.kind, self)

    def _bytes_of(self, own: Owned, itemsize: int) -> int:
        itemsize = ITEMSIZE.get(self.dtype or self.master or "", itemsize)
        each = ROW_BYTES * own.num_blocks if self.dtype == INT8 else itemsize * own.numel
        return self.num_moments * each + self.bytes_per_tensor * own.num_tensors


class Owned(NamedTuple):
    """Elements of one kind that the optimizer updates, and the spans in which they lie, each a tensor."""

    kind: str
    numel: int
    num_tensors: int
    num_blocks: int = 0  # of moments in 8 bits

    def times(self, num: int) -> Owned:
        return Owned(self.kind, *(num * each for each in self[1:]))


def owned_of(kind: str, numels: Collection[int]) -> Owned:
    return Owned(kind, sum(numels), len(numels), sum(map(num_blocks, numels)))


class HeldElements(NamedTuple):
    """Elements of all chunks that one rank holds; padding is part of no owned span."""

    resting: int  # parameters at rest, padding included
    padding: int  # the part of `resting` that is padding
    parts: tuple[Owned, ...]

    @property
    def owned(self) -> int:
        return sum(own.numel for own in self.parts)
