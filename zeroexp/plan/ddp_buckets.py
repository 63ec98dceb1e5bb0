"""DistributedDataParallel's memory on fake tensors: its reducer is C++ and needs values, so its buckets are told again.

The reducer's buckets are as large as the trainable parameters. When a gradient is complete, the reducer copies it into
its bucket and, with `gradient_as_bucket_view`, puts a view of the bucket in its place. How the copies travel is not
rehearsed: the closed form in torch_closed_forms.py has the traffic. A test compares the peak with the real reducer's.

ZeroRedundancyOptimizer exchanges objects when it starts, so that its rule is told again too: each parameter, the
largest first, goes to the rank that updates least so far.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroexp.engines import torch_ddp
from zeroexp.interface.strategy import OptimizerFactory

DEFAULT_BUCKET_BYTES = 25 << 20


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

    @contextmanager
    def no_sync(self) -> Generator[None]:
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def _reduce(self, bucket: Tensor, parameter: Tensor) -> None:
        if self._syncs and parameter.grad is not None:
            bucket.copy_(parameter.grad)
            if self._as_views:
                parameter.grad = bucket.view_as(parameter)
            else:
                parameter.grad.copy_(bucket)


def optimizer_of_own_parameters(
    groups: list[dict[str, Any]], factory: OptimizerFactory, shard: bool
) -> tuple[Optimizer, Optimizer]:
    """Return the optimizer of what this rank updates, twice, as `_make_optimizer` of TorchDDP does."""
    rank, load = dist.get_rank(), [0] * dist.get_world_size()
    own: list[dict[str, Any]] = []
    for group in groups:
        mine: list[Tensor] = []
        for parameter in sorted(group["params"], key=lambda p: p.numel(), reverse=True):
            least = load.index(min(load))
            load[least] += parameter.numel()
            if least == rank or not shard:
                mine.append(parameter)
        own.append({**group, "params": mine})
    optimizer = factory(own)
    return optimizer, optimizer


@contextmanager
def buckets_in_python() -> Generator[None]:
    """Let TorchDDP use `Buckets` and `optimizer_of_own_parameters` inside."""
    real = torch_ddp.DistributedDataParallel, torch_ddp._make_optimizer
    torch_ddp.DistributedDataParallel = Buckets  # pyright: ignore[reportAttributeAccessIssue]
    torch_ddp._make_optimizer = optimizer_of_own_parameters
    try:
        yield
    finally:
        torch_ddp.DistributedDataParallel, torch_ddp._make_optimizer = real
