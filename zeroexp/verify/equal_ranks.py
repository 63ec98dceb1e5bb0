"""What stands in the plain process for the other ranks: ranks that all give what this one gives."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork
from torch.distributed import ReduceOp, distributed_c10d

from zeroexp.process.world import RankInfo, environment_of_rank

# What torch says of a collective that a fake group refuses, and what it means here.
REFUSED = "error_on_collective=true"
# Of equal values; a product, and what is or is not in an odd number of them, depends on how many there are.
REDUCTIONS = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN
REMEDY = (
    "a collective, or a reduction, that one process can not stand in for; let Loop(loss=...) return (sum, count) of "
    "the microbatch alone, and Loop(optimizer=...) the plain optimizer"
)


def stand_for_ranks(size: int) -> None:
    """Be for a loop's own code the first of `size` ranks, of whose number its rate or microbatches may be made."""
    dist.destroy_process_group()
    distributed_c10d.ProcessGroupGloo = EqualRanks  # pyright: ignore[reportAttributeAccessIssue]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=size)
    os.environ.update(environment_of_rank(RankInfo(0, size, 0)))


class EqualRanks(dist.ProcessGroup):
    """Stands for torch's gloo where all ranks give the same: a sum is a multiple, and a gather copies.

    Whoever judges by it compares what ranks give. Its backend refuses every collective that is not here.
    """

    given: ClassVar[list[Tensor]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self.options = SimpleNamespace()  # in which torch notes the group's name
        backend: Any = FakeProcessGroup
        options = backend.Options()
        options.error_on_collective = True
        refusing = backend._create_internal(rank, size, options)
        self._register_backend(torch.device("cpu"), self.BackendType.CUSTOM, refusing)

    def _set_sequence_number_for_group(self) -> None: ...

    def barrier(self, *_: Any, **__: Any) -> FakeWork:
        return FakeWork()

    monitored_barrier = barrier

    def send(self, *_: Any) -> None:  # which the fake backend lets pass
        raise RuntimeError(REFUSED)

    recv = recv_anysource = send  # pyright: ignore[reportAssignmentType]

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        if not any(options.reduceOp == each for each in REDUCTIONS):
            return super().allreduce(tensors, options)
        self.given.extend(each.detach().clone() for each in tensors)
        for tensor in tensors if options.reduceOp == ReduceOp.SUM else ():
            tensor.data *= self.size()  # as gloo, unseen by autograd
        return FakeWork()

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        if options.rootRank != self.rank():
            return super().broadcast(tensors, options)
        self.given.extend(each.detach().clone() for each in tensors)
        return FakeWork()

    def allgather(self, copies: list[list[Tensor]], tensors: list[Tensor], *_: Any) -> FakeWork:
        self.given.extend(each.detach().clone() for each in tensors)
        for each, own in zip(copies, tensors, strict=True):
            for copy in each:
                copy.data.copy_(own)
        return FakeWork()

    def _allgather_base(self, copies: Tensor, own: Tensor, *_: Any) -> FakeWork:
        return self.allgather([list(copies.view(self.size(), *own.shape))], [own])

    # Its name since torch 2.13.
    all_gather_single = _allgather_base  # pyright: ignore[reportAssignmentType]
