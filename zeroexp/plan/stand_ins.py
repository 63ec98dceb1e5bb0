"""What a rehearsed rank meets in place of the world: peers of its host, DistributedDataParallel's reducer, samples.

[Note: neighbours] The direct transport of a CPU rank whose peers do not exist: some share its host, the others are far
away. Buckets, reductions in flight, messages and the lives of gradients are those of the real transport, which is
inherited. Messages go to a process group that moves nothing. Only the memory that ranks share is different, since a
rehearsal has no memory that could be mapped:

    parameters at rest    tensors of their own
    slots                 one tensor as large as the rest of the arena
    a neighbour's slot    a tensor that does not count

[Note: reducer] DistributedDataParallel's reducer is C++ and needs values, so its buckets are told again. They are as
large as the trainable parameters. When a gradient is complete, the reducer copies it into its bucket and, with
`gradient_as_bucket_view`, puts a view of the bucket in its place. How the copies travel is not rehearsed: the closed
form in torch_closed_forms.py has the traffic, and the rule of ZeroRedundancyOptimizer, which exchanges objects when it
starts. A test compares the peak with that of the real ones.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroexp.comm.collectives import TRANSPORTS
from zeroexp.comm.direct import Direct
from zeroexp.comm.point_to_point import ReceivedTensors
from zeroexp.comm.shared_memory import SharedChannel
from zeroexp.comm.shared_memory_sizes import arena_bytes, num_slots
from zeroexp.config.keys import Config
from zeroexp.data import Microbatch, StepBatch
from zeroexp.data.synthetic import width_of
from zeroexp.engines import torch_ddp
from zeroexp.interface.strategy import OptimizerFactory
from zeroexp.plan.storages import Storages
from zeroexp.plan.torch_closed_forms import deal_out
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World

SLOTS = "shared slots"
DEFAULT_BUCKET_BYTES = 25 << 20


def absent_neighbours(
    storages: Storages, ranks_per_host: int | None
) -> AbstractContextManager[Any]:
    """Let engines of CPU ranks that are built inside choose this transport if they are free to choose."""
    words = {"auto": ranks_per_host, "messages": 1} if ranks_per_host else {}
    direct = partial(DirectWithoutNeighbours, storages=storages)
    chosen = {word: partial(direct, ranks_per_host=ranks) for word, ranks in words.items()}
    return patch.dict(TRANSPORTS, chosen)


class DirectWithoutNeighbours(Direct):
    """The transport of one rank; nothing moves. The ranks of a host follow one another."""

    def __init__(self, world: World, moves: Moves, storages: Storages, ranks_per_host: int) -> None:
        super().__init__(world, moves, share_memory=True)
        self._storages, self._ranks_per_host = storages, ranks_per_host
        self._slots: Tensor | None = None

    def connect(self) -> None:
        hosts = [number // self._ranks_per_host for number in self._world.numbers]
        self._neighbours = [peer for peer in self._peers if hosts[peer] == hosts[self._rank]]
        self._channels |= dict.fromkeys(self._neighbours, AbsentNeighbour(self._storages))
        self.traits = self._find_traits()

    def reserve(self, resting: Sequence[int], slot_bytes: int) -> None:
        if self._neighbours:
            beside = arena_bytes(resting, slot_bytes, num_slots(self.traits.name)) - sum(resting)
            self._slots = torch.empty(beside, dtype=torch.uint8, device=self._world.device)
            self._storages.assign_kind(SLOTS, [self._slots])


class AbsentNeighbour(SharedChannel):
    """The channel to a neighbour that does not exist: what it sends lies in its own slots, which are not ours."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages

    def send(
        self, tag: int, tensors: Sequence[Tensor], what: str, dtype: torch.dtype | None = None
    ) -> list[Any]:
        return []

    def receive(
        self, tag: int, like: Sequence[Tensor], what: str, *, into: bool
    ) -> ReceivedTensors:
        if into:
            return ReceivedTensors(lambda: list(like), lambda: None)
        with self._storages.not_counting():
            terms = [torch.empty_like(tensor) for tensor in like]
        return ReceivedTensors(lambda: terms, lambda: None)

    def copy_exposed(self, exposure: int, targets: Sequence[Tensor], what: str) -> None:
        pass


# -- [Note: reducer] -------------------------------------------------------------------------------


class Buckets(nn.Module):
    """A module whose gradients go through buckets, as in DistributedDataParallel."""

    def __init__(
        self, module: nn.Module, *, gradient_as_bucket_view: bool, find_unused_parameters: bool
    ) -> None:
        super().__init__()
        self.module = module
        self.bucket_bytes_cap = DEFAULT_BUCKET_BYTES
        self._as_views = gradient_as_bucket_view
        self._syncs = True
        for parameter in module.parameters():
            if parameter.requires_grad:
                bucket = torch.empty_like(parameter)
                hook = partial(self._reduce, bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # pyright: ignore[reportUnknownMemberType]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[Any]:
        return patch.object(self, "_syncs", False)

    def _reduce(self, bucket: Tensor, parameter: Tensor) -> None:
        if self._syncs and parameter.grad is not None:
            bucket.copy_(parameter.grad)
            if self._as_views:
                parameter.grad = bucket.view_as(parameter)
            else:
                parameter.grad.copy_(bucket)


def zero_redundancy_stand_in(
    groups: list[dict[str, Any]], factory: OptimizerFactory, shard: bool
) -> tuple[Optimizer, Optimizer]:
    """Return the optimizer of what this rank updates, twice, as `_make_optimizer` of TorchDDP does."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if shard else (0, 1)
    mine = deal_out([group["params"] for group in groups], Tensor.numel, size)[rank]
    own = [{**group, "params": each} for group, each in zip(groups, mine, strict=True)]
    optimizer = factory(own)
    return optimizer, optimizer


def buckets_in_python() -> AbstractContextManager[Any]:
    """Let TorchDDP use `Buckets` and `zero_redundancy_stand_in` inside."""
    own: Any = {"DistributedDataParallel": Buckets, "_make_optimizer": zero_redundancy_stand_in}
    return patch.multiple(torch_ddp, **own)


# -- samples ---------------------------------------------------------------------------------------


class NoData:
    """Samples of the configured shape, without values.

    most: so many microbatches of a step are given out; None: all. holds_others: the samples of the others are in the
    rank's memory all the same.
    """

    def __init__(
        self, config: Config, most: int | None = None, *, holds_others: bool = False
    ) -> None:
        self._config, self._most, self._holds_others = config, most, holds_others
        self._others: list[Microbatch] = []

    def step_batch(
        self, position: int, *, rank: int, world_size: int, replica: range | None = None
    ) -> StepBatch:
        data = self._config.data
        num = data.global_batch_size // (data.micro_batch_size * world_size)
        num_tokens = data.global_batch_size * data.seq_len
        most = min(num, self._most or num)
        self._others = [self.microbatch() for _ in range(num - most) if self._holds_others]
        return StepBatch([self.microbatch() for _ in range(most)], num_tokens, num_tokens)

    def microbatch(self) -> Microbatch:
        model, data = self._config.model, self._config.data
        shape = (data.micro_batch_size, data.seq_len)
        if data.task == "regression":
            vectors = torch.empty(*shape, width_of(model))
            return Microbatch({"vectors": vectors}, torch.empty_like(vectors))
        tokens = torch.empty(shape, dtype=torch.int64)
        labels = shape[:1] if data.task == "classification" else shape
        return Microbatch({"input_ids": tokens}, torch.empty(labels, dtype=torch.int64))
