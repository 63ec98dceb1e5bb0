"""Who am I and who are we: rank, world size, device, process group. The only reader of rank variables.

`join` is the same call on a laptop, under torchrun and under Slurm; a world of one joins a group of one, so that
nothing after it asks whether it is distributed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group is there: its defaults would keep it for good


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    backend: str  # gloo | nccl | fake
    timeout_seconds: float = 600.0  # a peer silent for longer is taken for dead


@dataclass(frozen=True)
class Place:
    """One process among `size`, as its launcher numbered it."""

    rank: int
    size: int
    local_rank: int


def place_from_environment(env: Mapping[str, str]) -> Place:
    """The torchrun variables, else Slurm's, else a world of one."""
    for rank, size, local in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        if rank in env and size in env:
            return Place(int(env[rank]), int(env[size]), int(env.get(local, "0")))
    return Place(0, 1, 0)


def environment(place: Place) -> dict[str, str]:
    """The variables in which `place_from_environment` finds this place again, for a launcher of ranks."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
    }


def join(*, device: str = "cpu", timeout_seconds: float = 600.0) -> World:
    """Join the process group the environment describes, on CPU with gloo or on this rank's GPU with NCCL.

    The ranks meet at ZEROEXP_RENDEZVOUS (an init method such as `file:///path`) or at MASTER_ADDR:MASTER_PORT;
    a world of one without either meets itself in memory.
    """
    place = place_from_environment(os.environ)
    own_device = torch.device("cuda", place.local_rank) if device == "cuda" else torch.device("cpu")
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    backend = "nccl" if own_device.type == "cuda" else "gloo"
    alone = place.size == 1 and "MASTER_ADDR" not in os.environ
    meeting: dict[str, object] = {"store": dist.HashStore()} if alone else {}
    if rendezvous := os.environ.get("ZEROEXP_RENDEZVOUS"):
        meeting = {"init_method": rendezvous}
    dist.init_process_group(
        backend,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout_seconds),
        **meeting,  # pyright: ignore[reportArgumentType]
    )
    return World(place.rank, place.size, own_device, backend, timeout_seconds)


def current(device: torch.device | str = "cpu", timeout_seconds: float = 600.0) -> World:
    """The world this process joined already by its own `init_process_group`: for use as a library.

    timeout_seconds: ranks of one host that wait for each other give up after it. What waits for a message gives up
    after the `timeout` of that `init_process_group`.
    """
    backend = str(dist.get_backend())
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, torch.device(device), backend, timeout_seconds)


def host_identity() -> tuple[str, int]:
    """Equal for processes that can share memory and sockets: same boot of a machine, same network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.stat("/proc/self/ns/net").st_ino


def leave() -> None:
    """Nothing of ours may keep the group: its gloo threads end only with it, and one that frees a tensor while the
    interpreter shuts down aborts the process.
    """
    dist.destroy_process_group()


@contextmanager
def joined(*, device: str = "cpu", timeout_seconds: float = 600.0) -> Iterator[World]:
    world = join(device=device, timeout_seconds=timeout_seconds)
    yield world
    leave()  # not in a `finally`: after an error the peers may be gone, and leaving would wait for them


def barrier() -> None:
    dist.barrier()


def background_group() -> dist.ProcessGroup:
    """All ranks once more, over gloo: what a thread sends never meets what training sends. Called by all ranks."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


Thing = TypeVar("Thing")


def gather(thing: Thing) -> list[Thing]:
    """Every rank's small picklable thing, by rank; not for a timed region."""
    things: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def broadcast(tensor: torch.Tensor) -> None:
    """Rank 0's values for every rank, in place."""
    dist.broadcast(tensor, src=0)


def sum_over_ranks(tensor: torch.Tensor) -> None:
    """The sum on every rank, in place."""
    dist.all_reduce(tensor)
