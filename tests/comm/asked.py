"""What is asked of the backend: the very calls of torch.distributed, and which of them one launch holds."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch.distributed as dist

from zeroexp.process.world import World

GATHERS = ["all_gather_single", "all_gather_into_tensor"]
REDUCTIONS = ["reduce_scatter_single", "reduce_scatter_tensor"]
LISTS = ["all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"]


@dataclass
class Call:
    name: str
    num_bytes: int  # of the larger tensor
    rank: int | None = None  # the root of a broadcast or a reduction


@dataclass
class Asked:
    """The launches of one rank, each with its calls."""

    launches: list[list[Call]] = field(default_factory=list[list[Call]])
    groups: dict[str, set[str]] = field(default_factory=dict[str, set[str]])  # of calls, by name

    def sent_bytes(self, rank: int, size: int) -> int:
        """What `rank` sends: every peer gets what it lacks; an all-reduce sends it twice, evenly."""
        return sum(_sent_bytes(call, rank, size) for launch in self.launches for call in launch)


def _sent_bytes(call: Call, rank: int, size: int) -> int:
    if call.name == "all_reduce":
        return 2 * call.num_bytes * (size - 1) // size
    if call.rank is None:
        return call.num_bytes // size * (size - 1)
    sends_to = {"broadcast": size - 1 if rank == call.rank else 0, "reduce": int(rank != call.rank)}
    return call.num_bytes * sends_to[call.name]


class _Launch:
    """Plays one launch of NCCL over a backend that has none: its wait is that of each call."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@contextmanager
def asking() -> Generator[Asked]:
    """Note what is asked of the backend inside, and let it be done."""
    asked, launch = Asked(), list[_Launch]()
    real: Any = dist._coalescing_manager

    def noting(name: str) -> Callable[..., Any]:
        call = getattr(dist, name)

        def noted(*tensors: Any, **options: Any) -> Any:
            root = options.get("group_src", options.get("group_dst"))
            noted = Call(name, max(t.nbytes for t in tensors if hasattr(t, "nbytes")), root)
            asked.groups.setdefault(name, set()).add(options["group"].group_name)
            if launch:
                asked.launches[-1].append(noted)
            else:
                asked.launches.append([noted])
            work = call(*tensors, **options)
            if launch:
                launch[-1].works.append(work)
            return work

        return noted

    @contextmanager
    def one_launch(group: Any, device: Any, async_ops: bool) -> Generator[Any]:
        asked.launches.append([])
        launch.append(_Launch())
        try:
            if dist.get_backend(group) == "gloo":
                yield launch[-1]
            else:
                with real(group, device, async_ops=async_ops) as launched:
                    yield launched
        finally:
            launch.pop()

    names = [*GATHERS, *REDUCTIONS, *LISTS, "all_reduce", "broadcast", "reduce"]
    patched = {name: noting(name) for name in names if hasattr(dist, name)}
    with _patching({**patched, "_coalescing_manager": one_launch}):
        yield asked


def _patching(names: dict[str, Any]) -> AbstractContextManager[Any]:
    return mock.patch.multiple(dist, **names)


def as_nccl(world: World) -> World:
    """The same ranks, whose backend has the name nccl."""
    return replace(world, backend="nccl")
