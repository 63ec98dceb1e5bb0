"""Closed forms of torch's engines: DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2.

    ddp          DDP: everything replicated; its C++ buckets hold one more copy of the gradients
    zero1        DDP and ZeroRedundancyOptimizer: whole tensors' optimizer state on the least loaded rank
    zero2, zero3 FSDP2: each parameter is cut along dim 0 in ceil(rows / N) rows, padded; zero2 leaves it gathered

Traffic is what the algorithm needs, as NCCL's rings send it, without the few bytes of norms and buffers. gloo sends
more: its reduce-scatter is an all-reduce inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from zeroexp.measure.record import MOMENTS, Traffic
from zeroexp.plan.closed_forms import ITEMSIZE, HeldElements, OptimizerForm, PrecisionForm

FP32, ADAMW = PrecisionForm(), OptimizerForm()


@dataclass(frozen=True)
class ParameterShape:
    shape: tuple[int, ...]
    trainable: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class DdpForm:
    """DistributedDataParallel, with ZeroRedundancyOptimizer where `shards_optimizer`.

    groups: the optimizer's parameter groups, which ZeroRedundancyOptimizer deals out one after the other.
    """

    groups: Sequence[Sequence[ParameterShape]]
    frozen: Sequence[ParameterShape]
    world_size: int
    shards_optimizer: bool = False
    gradient_as_bucket_view: bool = True
    accumulation: int = 1
    precision: PrecisionForm = FP32
    optimizer: OptimizerForm = ADAMW

    def traffic(self, rank: int) -> Traffic:
        """Return the bytes `rank` sends in one step, by kind; how many calls it takes is DDP's own business."""
        trainable = self._gradient_bytes
        around = 2 * trainable * (self.world_size - 1) // self.world_size
        sent = {"reduce": around} if self.world_size > 1 else {}
        if self.shards_optimizer and self.world_size > 1:
            own = self.parameter_itemsize * self.held_elements(rank).owned
            sent["publish"] = (self.world_size - 1) * own
        return Traffic(bytes_by_kind=sent)

    def held_bytes(self, moment: str, rank: int) -> dict[str, int]:
        """Return the bytes of model states on `rank` at one of MOMENTS, by kind, as TorchDDP counts them."""
        assert moment in MOMENTS, moment
        held = self.held_elements(rank)
        moments = self.optimizer.num_moments * self.parameter_itemsize * held.owned
        return {
            "parameters": self.parameter_itemsize * held.resting,
            "gradients": self._gradient_bytes if self._has_gradients(moment) else 0,
            "optimizer": moments + self.optimizer.bytes_per_tensor * held.num_owned,
            "master": 0,
            "buffers": self._bucket_bytes(moment),
        }

    def _bucket_bytes(self, moment: str) -> int:
        """Return the bytes of the C++ buckets, or 0 where the gradients that exist are views of them."""
        are_views = self.gradient_as_bucket_view and moment in ("after_backward", "after_step")
        return 0 if are_views else self._gradient_bytes

    def held_elements(self, rank: int) -> HeldElements:
        """Return what `rank` holds: all parameters, and the optimizer state of those that it updates."""
        owned = self._owned[rank if self.shards_optimizer else 0]
        resting = self._num_trainable + sum(p.numel for p in self.frozen)
        return HeldElements(resting, 0, sum(owned), len(owned))

    def equivalence_key(self, rank: int) -> Hashable:
        """Return a key that is equal for ranks that hold and send as much."""
        return self.held_elements(rank)

    @cached_property
    def _owned(self) -> list[list[int]]:
        """Sizes of the parameters that each rank updates, dealt out as ZeroRedundancyOptimizer does."""
        owned: list[list[int]] = [
            [] for _ in range(self.world_size if self.shards_optimizer else 1)
        ]
        load = [0] * len(owned)
        for group in self.groups:
            for numel in sorted((p.numel for p in group), reverse=True):
                rank = load.index(min(load))
                owned[rank].append(numel)
                load[rank] += numel
        return owned

    def _has_gradients(self, moment: str) -> bool:
        between = moment == "after_forward" and self.accumulation > 1
        return between or moment in ("after_backward", "after_step")

    @property
    def updates_everywhere(self) -> bool:
        """Whether every rank updates all parameters."""
        return not self.shards_optimizer

    @property
    def parameter_itemsize(self) -> int:
        """Bytes of one element of a parameter at rest."""
        return ITEMSIZE[self.precision.compute]

    @property
    def _gradient_bytes(self) -> int:
        return self.parameter_itemsize * self._num_trainable

    @cached_property
    def _num_trainable(self) -> int:
        return sum(p.numel for group in self.groups for p in group)


@dataclass(frozen=True)
class FsdpForm:
    """FSDP2: `units` are the parameters of the root and of each block; the root stays gathered until its backward."""

    units: Sequence[Sequence[ParameterShape]]
    world_size: int
    reshards: bool = True  # blocks are freed after forward: zero3
    accumulation: int = 1
    precision: PrecisionForm = FP32
    optimizer: OptimizerForm = ADAMW

    def traffic(self, rank: int) -> Traffic:
        """Return the bytes `rank` sends in one step, by kind, and the number of its collectives."""
        if self.world_size == 1:
            return Traffic()
        compute, reduce = ITEMSIZE[self.precision.compute], ITEMSIZE[self.precision.reduce]
        gathers = [self.accumulation if self.reshards else 1]
        gathers += [2 * self.accumulation if self.reshards else 1] * (len(self.units) - 1)
        used = [(unit, num) for unit, num in zip(self.units, gathers, strict=True) if unit]
        peers = self.world_size - 1
        return Traffic(
            bytes_by_kind={
                "gather": peers * compute * sum(num * self._shard(unit) for unit, num in used),
                "reduce": peers * reduce * self.accumulation * self._shard(self._all),
            },
            calls_by_kind={
                "gather": sum(num for _, num in used),
                "reduce": self.accumulation * len(used),
            },
        )

    def held_bytes(self, moment: str, rank: int) -> dict[str, int]:
        """Return the bytes of model states on `rank` at one of MOMENTS, by kind, as TorchFSDP2 counts them."""
        assert moment in MOMENTS, moment
        held, master = self.held_elements(rank), ITEMSIZE[self.precision.master]
        between = moment == "after_forward" and self.accumulation > 1
        has_gradients = between or moment in ("after_backward", "after_step")
        moments = self.optimizer.num_moments * master * held.owned
        return {
            "parameters": master * held.resting,
            "gradients": master * self._shard(self._trainable) if has_gradients else 0,
            "optimizer": moments + self.optimizer.bytes_per_tensor * held.num_owned,
            "master": 0,  # the shards are the master weights
            "buffers": self._gathered_bytes if moment == "after_forward" else 0,
        }

    @property
    def _gathered_bytes(self) -> int:
        """Bytes gathered between forward and backward: those of the root, and without reshard of all blocks."""
        gathered = self.units[0] if self.reshards else self._all
        return self.world_size * self._shard(gathered) * ITEMSIZE[self.precision.compute]

    def held_elements(self, rank: int) -> HeldElements:
        """Return what `rank` holds: shards that are padded alike on all ranks, and moments of its real rows."""
        real = own = 0
        for parameter, num in self._different.items():
            numel = num * _rows(parameter, rank, self.world_size) * _rest(parameter)
            real += numel
            own += numel if parameter.trainable else 0
        return HeldElements(self._resting, self._resting - real, own, len(self._trainable))

    def equivalence_key(self, rank: int) -> Hashable:
        """Return a key that is equal for ranks that hold and send as much."""
        return self.held_elements(rank)

    @cached_property
    def _different(self) -> Counter[ParameterShape]:
        return Counter(self._all)

    @cached_property
    def _resting(self) -> int:
        return self._shard(self._all)

    @property
    def updates_everywhere(self) -> bool:
        """Whether every rank updates all parameters."""
        return False

    @property
    def parameter_itemsize(self) -> int:
        """Bytes of one element of a parameter at rest."""
        return ITEMSIZE[self.precision.master]

    @cached_property
    def _trainable(self) -> list[ParameterShape]:
        return [p for p in self._all if p.trainable]

    @cached_property
    def _all(self) -> list[ParameterShape]:
        return [p for unit in self.units for p in unit]

    def _shard(self, unit: Sequence[ParameterShape]) -> int:
        """Return the elements of one rank's shard, padding included."""
        return sum(-(-_length(p) // self.world_size) * _rest(p) for p in unit)


def _length(parameter: ParameterShape) -> int:
    return parameter.shape[0] if parameter.shape else 1


def _rest(parameter: ParameterShape) -> int:
    return prod(parameter.shape[1:])


def _rows(parameter: ParameterShape, rank: int, world_size: int) -> int:
    """Return the real rows of `rank`; by torch.chunk's rule the last ranks may have fewer, or none."""
    rows, most = _length(parameter), -(-_length(parameter) // world_size)
    return max(0, min(rows, (rank + 1) * most) - rank * most)
