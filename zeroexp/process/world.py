"""Rank, world size, device and process groups of this process. Slurm's are read in cluster/task.py too.

`join_process_group` is the same call on a laptop, under torchrun and under Slurm. A single rank joins a group of one,
so that no later code asks whether it is distributed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported before a group exists: its default arguments would keep one alive
from torch import nn

from zeroexp.cut.rank_grid import RankGrid
from zeroexp.process import progress
from zeroexp.process.ports import FILE_SCHEME, SCHEME
from zeroexp.process.rendezvous import open_store


@dataclass(frozen=True)
class World:
    """Ranks that work together: all of them, or those of one group; `rank` and `size` count inside of it."""

    rank: int
    size: int
    device: torch.device
    backend: str  # gloo | nccl | fake
    timeout_seconds: float = 600.0  # a peer that is silent for longer counts as dead
    members: range | None = None  # the ranks of a group, as numbered among all; None: all ranks
    lane: str = ""  # a communicator of its own for these ranks, whose moves wait for no others

    @property
    def numbers(self) -> range:
        """The number of each rank among all ranks."""
        return range(self.size) if self.members is None else self.members

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of these ranks. Nobody may keep it: a group that is kept outlives `leave_process_group`."""
        whole = dist.group.WORLD
        assert whole is not None
        return _groups[whole][self._key] if self._is_own else whole

    def split(self, grid: RankGrid) -> tuple[World, World]:
        """Return this rank's group, and the ranks that have its place in the other groups."""
        return self._part(grid.group(self.rank)), self._part(grid.holders(self.rank))

    def _part(self, members: range) -> World:
        if len(members) == self.size:
            return self
        return replace(self, rank=members.index(self.rank), size=len(members), members=members)

    def join(self) -> None:
        """Make the process group of these ranks, who call it together, unless it exists."""
        whole = dist.group.WORLD
        assert whole is not None
        groups = _groups.setdefault(whole, WeakValueDictionary())
        if not self._is_own or self._key in groups:
            return
        progress.count_move()
        timeout = timedelta(seconds=self.timeout_seconds)
        group = dist.new_group([*self.numbers], timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        groups[self._key] = group

    def with_communicator(self, lane: str) -> World:
        """Return the same ranks with a communicator of their own, which exists once all have called `join`."""
        return replace(self, lane=lane)

    @property
    def _is_own(self) -> bool:
        """Whether the process group is one of `join`, and not that of all ranks."""
        return self.members is not None or bool(self.lane)

    @property
    def _key(self) -> tuple[range, str]:
        return self.numbers, self.lane

    @property
    def is_fake(self) -> bool:
        """Whether the other ranks do not exist: collectives move nothing, and tensors may have no values to read."""
        return self.backend == "fake"

    @property
    def timed_device(self) -> torch.device:
        """The device whose clock and allocator tell what a step costs; a fake world leaves its device alone."""
        return torch.device("cpu") if self.is_fake else self.device

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """Start to copy a one-dimensional tensor from a GPU to the host, and return a call that waits for its values.

        It does not wait for what the device is given after this. In a fake world there may be no values: all are nan.
        """
        if self.is_fake:
            size = len(tensor)
            return lambda: [float("nan")] * size
        values, copied = tensor.detach(), None
        if tensor.is_cuda:
            # Memory that is not pinned would be copied while the host waits.
            there = torch.empty_like(values, device="cpu", pin_memory=True)
            values, copied = there.copy_(values, non_blocking=True), torch.cuda.Event()
            copied.record(torch.cuda.current_stream(tensor.device))

        def read() -> list[float]:
            if copied is not None:
                copied.synchronize()
            return values.double().numpy().tolist()  # numpy knows no bfloat16

        return read


# The groups that this process belongs to, by the process group of all ranks; torch keeps them alive.
_groups: WeakKeyDictionary[
    dist.ProcessGroup, WeakValueDictionary[tuple[range, str], dist.ProcessGroup]
] = WeakKeyDictionary()


@dataclass(frozen=True)
class RankInfo:
    """The numbers that the launcher gave one process among `size`."""

    rank: int
    size: int
    local_rank: int


def rank_info_from_environment(env: Mapping[str, str]) -> RankInfo:
    """Read the place from torchrun's variables, else from Slurm's, else return a world of one."""
    for rank, size, local in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        if rank in env and size in env:
            return RankInfo(int(env[rank]), int(env[size]), int(env.get(local, "0")))
    return RankInfo(0, 1, 0)


def environment_of_rank(place: RankInfo) -> dict[str, str]:
    """Return the variables that `rank_info_from_environment` reads; a launcher sets them for its ranks."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
    }


def join_process_group(*, device: str = "cpu", timeout_seconds: float = 600.0) -> World:
    """Join the process group that the environment describes, on CPU with gloo or on this rank's GPU with NCCL.

    The ranks meet at ZEROEXP_RENDEZVOUS (rendezvous.py, or an init method of torch such as `tcp://host:port`) or at
    MASTER_ADDR:MASTER_PORT. A single rank without either uses a store in its own memory.
    """
    place = rank_info_from_environment(os.environ)
    own_device = torch.device("cpu")
    if device == "cuda":
        own_device = torch.device("cuda", device_index(place.local_rank, torch.cuda.device_count()))
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    backend = "nccl" if own_device.type == "cuda" else "gloo"
    alone = place.size == 1 and "MASTER_ADDR" not in os.environ
    meeting: dict[str, object] = {"store": dist.HashStore()} if alone else {}
    if rendezvous := os.environ.get("ZEROEXP_RENDEZVOUS"):
        meeting = {"init_method": rendezvous}
        if rendezvous.startswith((SCHEME, FILE_SCHEME)):
            rank, size = place.rank, place.size
            store = open_store(rendezvous, rank=rank, size=size, timeout_seconds=timeout_seconds)
            meeting = {"store": store}
    dist.init_process_group(
        backend,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout_seconds),
        # NCCL connects now, where a broken link is told at start, and knows its GPU without a guess.
        device_id=own_device if own_device.type == "cuda" else None,
        **meeting,  # pyright: ignore[reportArgumentType]
    )
    return World(place.rank, place.size, own_device, backend, timeout_seconds)


def device_index(local_rank: int, num_visible: int) -> int:
    """Return which of the visible devices is this rank's: the only one, where a site shows each rank no more."""
    return 0 if num_visible == 1 else local_rank


def current(
    device: nn.Module | torch.device | str = "cpu", timeout_seconds: float = 600.0
) -> World:
    """Return the world of a process that called `init_process_group` itself, as a user of the library does.

    device: the model, or the device on which it lies.
    timeout_seconds: ranks of one host, and those of a group (replicas, nodes), give up waiting for each other after it.
    A wait for a message of any rank ends after the `timeout` that was given to `init_process_group`.
    """
    if isinstance(device, nn.Module):
        device = next(device.parameters()).device
    device = torch.device(device)
    # dist.get_backend names no backend where the group has one for each device, or chose it itself.
    backends = dict(each.split(":") for each in dist.get_backend_config().split(","))
    if device.type not in backends:
        raise ValueError(
            f"world.current(): the process group has no backend for {device}, only for {', '.join(backends)}: give "
            "init_process_group(backend=...) one, or current() the device on which the model lies"
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, device, backends[device.type], timeout_seconds)


def leave_process_group() -> None:
    """Destroy the process group. No object of ours may keep a reference to it.

    Its gloo threads end only with the group, and such a thread aborts the process if it frees a tensor while the
    interpreter shuts down.
    """
    dist.destroy_process_group()


@contextmanager
def joined_process_group(*, device: str = "cpu", timeout_seconds: float = 600.0) -> Iterator[World]:
    world = join_process_group(device=device, timeout_seconds=timeout_seconds)
    yield world
    leave_process_group()  # not in a `finally`: after an error the peers may be gone, and leaving would wait for them


@contextmanager
def fake_world(rank: int, size: int, device: torch.device | str = "cpu") -> Iterator[World]:
    """Be one rank of a world whose other ranks do not exist: collectives return at once and move nothing.

    It shows what does not depend on values: which moves happen, what they count and what memory is held. A model in it
    must lie on `device` already, and may consist of fake tensors.
    """
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        yield World(rank, size, torch.device(device), "fake")
    finally:
        dist.destroy_process_group()
        # torch leaves its own, which calls each line of a traceback one of a rank.
        sys.excepthook = hook


def barrier() -> None:
    progress.count_move()
    dist.barrier()


def background_group(timeout_seconds: float) -> dist.ProcessGroup:
    """Make a second group of all ranks, over gloo, whose messages never mix with those of training.

    A background thread uses it. All ranks call this together.
    """
    progress.count_move()
    group = dist.new_group(timeout=timedelta(seconds=timeout_seconds), backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


Thing = TypeVar("Thing")


def gather_objects(thing: Thing) -> list[Thing]:
    """Gather a small picklable object from every rank, in rank order. Do not call it in a timed region."""
    progress.count_move()
    things: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


Answer = TypeVar("Answer")


def decide_on_first_rank(
    thing: Thing, decide: Callable[[list[Thing]], Answer], group: dist.ProcessGroup
) -> Answer:
    """Return on every rank what rank 0, alone, decides of the small picklable objects of all ranks.

    group: that of the background thread which calls it, so that the moves of training are counted apart.
    """
    is_first = dist.get_rank() == 0
    things: Any = [None] * dist.get_world_size() if is_first else None
    dist.gather_object(thing, things, group=group)
    answer: list[Any] = [decide(things) if is_first else None]
    dist.broadcast_object_list(answer, group=group)
    return answer[0]


def same_everywhere(thing: object) -> bool:
    """Whether all ranks hold the same small picklable object."""
    things = gather_objects(thing)
    return all(each == things[0] for each in things)


def broadcast(tensor: torch.Tensor) -> None:
    """Copy rank 0's values into `tensor` on every rank."""
    progress.count_move()
    dist.broadcast(tensor, src=0)


def sum_over_ranks(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over ranks, on every rank."""
    progress.count_move()
    dist.all_reduce(tensor)
