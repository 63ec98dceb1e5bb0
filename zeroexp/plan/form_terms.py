"""What a closed form is made of: precision and optimizer of a point, elements that a rank holds, and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from zeroexp.cut.moment_blocks import INT8, ROW_BYTES, num_blocks
from zeroexp.cut.rank_grid import RankGrid
from zeroexp.measure.record import MOMENTS, Traffic

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
        spans = held.spans.items()
        return sum(n * self._of(kind)._bytes_of(numel, itemsize) for (kind, numel), n in spans)

    def counter_bytes(self, held: HeldElements) -> int:
        """Return the part of `num_bytes` that counts steps."""
        return sum(n * self._of(kind).bytes_per_tensor for (kind, _), n in held.spans.items())

    def master_bytes(self, held: HeldElements, itemsize: int, at_rest: int) -> int:
        """Return the bytes of master weights; those of the itemsize of parameters at rest are these."""
        kinds = {kind for kind, _ in held.spans}
        sizes = {kind: ITEMSIZE.get(self._of(kind).master or "", itemsize) for kind in kinds}
        spans = held.spans.items()
        return sum(sizes[k] * numel * n for (k, numel), n in spans if sizes[k] != at_rest)

    def _of(self, kind: str) -> OptimizerForm:
        return dict(self.of_kinds).get(kind, self)

    def _bytes_of(self, numel: int, itemsize: int) -> int:
        """Return the bytes of the state of one tensor."""
        itemsize = ITEMSIZE.get(self.dtype or self.master or "", itemsize)
        each = ROW_BYTES * num_blocks(numel) if self.dtype == INT8 else itemsize * numel
        return self.num_moments * each + self.bytes_per_tensor


class HeldElements(NamedTuple):
    """Elements of all chunks that one rank holds; padding is part of no owned span."""

    resting: int  # parameters at rest, padding included
    padding: int  # the part of `resting` that is padding
    # Kind and elements of a span that the optimizer updates, each a tensor -> how many of these there are.
    spans: Counter[tuple[str, int]]

    @property
    def owned(self) -> int:
        return sum(num * numel for (_, numel), num in self.spans.items())


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """What rests on each rank of any engine, from what a subclass says of its elements, gradients and buffers.

    at_rest: which dtype of the precision a parameter has. Moments have the master's, and so have master weights, which
    are others than the parameters where the dtypes differ, or where `copies_weights`.
    """

    world_size: int
    accumulation: int = 1  # microbatches in a step
    precision: PrecisionForm = field(default_factory=PrecisionForm)
    optimizer: OptimizerForm = field(default_factory=OptimizerForm)
    copies_weights = False
    at_rest: ClassVar[str] = "compute"

    def traffic(self, rank: int) -> Traffic:
        """Return the bytes `rank` sends in one step and the number of its collectives, by kind."""
        raise NotImplementedError

    def held_elements(self, rank: int) -> HeldElements:
        """Return what `rank` holds of all parameters."""
        raise NotImplementedError

    def _gradient_bytes(self, moment: str, rank: int) -> int:
        raise NotImplementedError

    def _buffer_bytes(self, moment: str, rank: int) -> int:
        raise NotImplementedError

    def held_bytes(self, moment: str, rank: int) -> dict[str, int]:
        """Return the bytes of model states on `rank` at one of MOMENTS of a step's last microbatch, by kind.

        This assumes that every trainable parameter has got a gradient.
        """
        assert moment in MOMENTS, moment
        held = self.held_elements(rank)
        at_rest = 0 if self.copies_weights else self.parameter_itemsize
        return {
            "parameters": self.parameter_itemsize * held.resting,
            "gradients": self._gradient_bytes(moment, rank) if self._has_gradients(moment) else 0,
            "optimizer": self.optimizer.num_bytes(held, self._master),
            "master": self.optimizer.master_bytes(held, self._master, at_rest),
            "secondary": 0,
            "buffers": self._buffer_bytes(moment, rank),
        }

    def padding_bytes(self, rank: int) -> int:
        """Return the bytes of padding among the parameters at rest."""
        return self.parameter_itemsize * self.held_elements(rank).padding

    def _has_gradients(self, moment: str) -> bool:
        between = moment == "after_forward" and self.accumulation > 1
        return between or moment in ("after_backward", "after_step")

    def equivalence_key(self, rank: int) -> Hashable:
        """Return a key that is equal for ranks that hold and send as much."""
        held = self.held_elements(rank)
        return held.resting, held.padding, frozenset(held.spans.items())

    @property
    def parameter_itemsize(self) -> int:
        """Bytes of one element of a parameter at rest."""
        return ITEMSIZE[getattr(self.precision, self.at_rest)]

    @property
    def grid(self) -> RankGrid:
        return RankGrid(self.world_size)

    @property
    def group_size(self) -> int:
        """Ranks that shard among themselves."""
        return self.grid.group_size

    @property
    def _compute(self) -> int:
        """Bytes of one element in the dtype of computation."""
        return ITEMSIZE[self.precision.compute]

    @property
    def _reduce(self) -> int:
        return ITEMSIZE[self.precision.reduce]

    @property
    def _master(self) -> int:
        return ITEMSIZE[self.precision.master]
