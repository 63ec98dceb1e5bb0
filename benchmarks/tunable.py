"""What a peer can be set to, and the peer with these settings: at most 16 of each, all of them exact.

DDP and ZeroRedundancyOptimizer on top of it: the size of buckets, a static graph, and who sums.
FSDP2: what moves together, gathering ahead, and who moves. DeepSpeed: sizes of buckets, overlap.

carrier    reduces and gathers by
gloo       the backend; its reduce-scatter is an all-reduce inside, of twice the bytes
exact      gloo's all-to-all, and a sum: the bytes of a reduce-scatter (FSDP2 alone)
shared     the memory that ours reads, so that what is left of a difference is the engine's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.nn.parallel import DistributedDataParallel

from zeroexp.comm.base import ReducePart
from zeroexp.comm.direct import Direct
from zeroexp.comm.shared_memory_sizes import aligned, chunk_of_sums
from zeroexp.config.keys import Config
from zeroexp.engines.build import build_strategy
from zeroexp.models.module import BuiltModel
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World

Settings = Mapping[str, Any]
MOST = 16  # settings of one peer

DDP = {
    "bucket_cap_mb": (1, 5, 25, 100),
    "static_graph": (False, True),
    "carrier": ("gloo", "shared"),
}
FSDP2 = {"carrier": ("gloo", "exact", "shared"), "unit": ("block", "model"), "prefetch": (0, 1)}
DEEPSPEED = {"overlap_comm": (True, False), "reduce_bucket_size": (500_000, 5_000_000, 50_000_000)}
SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "ddp": DDP,
    "zero_redundancy": DDP,
    "fsdp2_no_reshard": FSDP2,
    "fsdp2": FSDP2,
    "deepspeed2": DEEPSPEED,
    "deepspeed3": DEEPSPEED | {"stage3_param_persistence_threshold": (10_000, 100_000)},
}


def variants(peer: str) -> dict[str, dict[str, Any]]:
    """Return the settings of every variant of a peer, by name: fsdp2@carrier=exact,unit=block,prefetch=1."""
    axes = SETTINGS[peer]
    every = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    # One unit has no other that it could gather ahead.
    every = [each for each in every if (each.get("unit"), each.get("prefetch")) != ("model", 1)]
    assert len(every) <= MOST
    return {f"{peer}@{','.join(f'{k}={v}' for k, v in each.items())}": each for each in every}


def build_ddp(settings: Settings, config: Config, built: BuiltModel, world: World) -> Any:
    """DistributedDataParallel with these settings, alone or under ZeroRedundancyOptimizer."""
    numbers = {key: value for key, value in settings.items() if key != "carrier"}
    wrapped = partial(DistributedDataParallel, **numbers)
    with mock.patch("zeroexp.engines.torch_ddp.DistributedDataParallel", wrapped):
        engine: Any = build_strategy(config, built, world)
    if settings["carrier"] == "shared":
        engine._ddp.register_comm_hook(SharedMemory(world, _bytes_of(built)), _summed)
    return engine


def build_fsdp2(settings: Settings, config: Config, built: BuiltModel, world: World) -> Any:
    if settings["unit"] == "model":
        built = replace(built, blocks=[])
    engine: Any = build_strategy(config, built, world)
    sharded = [module for module in engine.model.modules() if isinstance(module, FSDPModule)]
    if settings["prefetch"]:
        _prefetch(sharded[1:])
    memory = None
    if settings["carrier"] == "shared":
        memory = SharedMemory(world, _bytes_of(built))
    for module in sharded:
        if memory is not None:
            module.set_custom_all_gather(Carrier(memory.all_gather))
            module.set_custom_reduce_scatter(Carrier(memory.reduce_scatter))
        elif settings["carrier"] == "exact":
            module.set_custom_reduce_scatter(Carrier(reduce_scatter_exactly))
    return engine


BUILD: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["ddp", "zero_redundancy"], build_ddp),
    **dict.fromkeys(["fsdp2", "fsdp2_no_reshard"], build_fsdp2),
}


def _prefetch(blocks: list[FSDPModule]) -> None:
    """Let each block gather the one after it, and in backward the one before it."""
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def _bytes_of(built: BuiltModel) -> int:
    """Bytes of all gradients in float32, with room for padding."""
    parameters = list(built.module.parameters())
    return aligned(4 * sum(p.numel() for p in parameters)) + 4096 * len(parameters)


# -- carriers ----------------------------------------------------------------------------------------


class SharedMemory:
    """The shared memory of ranks of one host, for engines that are not ours. Every call waits until it is done."""

    def __init__(self, world: World, slot_bytes: int):
        """slot_bytes: of the largest message."""
        self._size = world.size
        self._transport = Direct(world, Moves(world), share_memory=True)
        self._transport.connect()
        self._transport.reserve([], slot_bytes)
        assert self._transport.traits.name == "direct", "ranks of one host"

    def reduce_scatter(self, own: Tensor, gradients: Tensor) -> None:
        self._transport.reduce_scatter([self._part(gradients, [own])], "a reduction")[0].wait()

    def all_reduce(self, gradients: Tensor) -> None:
        self._transport.all_reduce([self._part(gradients, [])], "a sum")[0].wait()

    def all_gather(self, full: Tensor, piece: Tensor) -> None:
        rows = full.view(self._size, -1)
        transport = self._transport
        rows[transport._rank].copy_(piece.view(-1))
        theirs = {peer: [rows[peer]] for peer in transport._peers}
        mine = {peer: [rows[transport._rank]] for peer in transport._peers}
        transport._exchange(mine, theirs, transport._reduction_tag(), "a gather").wait()

    def _part(self, gradients: Tensor, out: list[Tensor]) -> ReducePart:
        flat = gradients.view(-1)
        return ReducePart(chunk_of_sums((flat.numel(),), self._size), [flat], out)


class Carrier(ReduceScatter, AllGather):
    """FSDP2's communicator that moves one tensor into another, and has when it returns."""

    def __init__(self, move: Callable[[Tensor, Tensor], None]):
        self._move = move

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        self._move(output_tensor, input_tensor)


def reduce_scatter_exactly(own: Tensor, gradients: Tensor) -> None:
    """Every rank gets the parts that it owns, and adds them in the order of ranks."""
    parts = torch.empty_like(gradients)
    dist.all_to_all_single(parts, gradients)
    torch.sum(parts.view(-1, own.numel()), 0, out=own)


def _summed(memory: SharedMemory, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook of DDP: the mean over ranks, as its own."""
    gradients = bucket.buffer()
    memory.all_reduce(gradients)
    gradients.div_(memory._size)
    done = torch.futures.Future[Tensor]()
    done.set_result(gradients)
    return done


_summed.__annotations__.clear()  # DDP compares them with classes, and here they are texts
