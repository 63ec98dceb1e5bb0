"""A device with streams, played on the CPU, and what happens on it in no order.

On a GPU the host only launches: kernels run in the order of their stream, and a collective on a stream of its own. That
begins after what was launched before it, and whoever calls `wait` lets what comes later begin after it. A missing wait
is a race there, and on a CPU it is nothing. So each access of memory is noted with its stream and that stream's clock:

    compute    ── pack ──●──────── forward ──────●── unpack ──▶     each ● joins the clocks of the two streams
    a group            launch ── all-gather ── wait

An access is wrong if another stream has written the same bytes, or read what it writes, and its clock has not been
joined since: no run has to lose the race. To free memory is to write all of it, since whoever allocates next writes.

Where optimizer state rests on the host (comm/bus.py), the host is a stream of its own. What it launches comes after
what it has done, and copies over the bus run on the compute stream, for which it waits by marks alone.

What ranks launch must be the same on every rank, in one order (`launches`), and be waited for at some time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroexp.comm import bus
from zeroexp.measure.memory import on_host
from zeroexp.process.watchdog.differs import Moves
from zeroexp.process.world import World
from zeroexp.zero.engine import Engine
from zeroexp.zero.held import unguarded

COMPUTE = "compute"
HOST = "host"
# Operations that look at the size of a tensor and not at its values.
OF_SIZES = ("empty", "new_", "zeros_like", "ones_like", "full_like", "is_same_size")
# Which of a call's tensors it writes and which it reads; of a rooted one that depends on the rank.
WRITES_AND_READS = {
    **dict.fromkeys(["all_gather_single", "all_gather_into_tensor"], ((0,), (1,))),
    **dict.fromkeys(["reduce_scatter_single", "reduce_scatter_tensor"], ((0,), (1,))),
    "all_reduce": ((0,), ()),
}
ROOTED = {"broadcast": "group_src", "reduce": "group_dst"}


@dataclass(frozen=True)
class Access:
    """What a stream did with some bytes of a storage."""

    start: int
    stop: int
    stream: str
    tick: int
    writes: bool
    by: str


@dataclass
class PlayedWork:
    """A launch: to wait for it is to join its clock. It holds its tensors, as NCCL does until then."""

    device: PlayedDevice
    stream: str
    works: list[Any] = field(default_factory=list[Any])
    clock: Counter[str] = field(default_factory=Counter[str])
    what: str = ""
    is_waited: bool = False

    def wait(self) -> None:
        self.is_waited = True
        with self.device.in_backend():
            for work in self.works:
                work.wait()
        self.device.clocks[COMPUTE] |= self.clock


@dataclass
class PlayedMark:
    """A place in the compute stream: the host that waits for it joins the clock of then."""

    device: PlayedDevice
    clock: Counter[str]

    def synchronize(self) -> None:
        self.device.clocks[HOST] |= self.clock


class PlayedDevice(TorchDispatchMode):
    """Notes what is done to memory while it is the mode; `problems` says what is in no order."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.launches: list[
            tuple[str, str, int]
        ] = []  # what for, by which call, elements if of all ranks
        self.clocks: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.what = ""  # what the next launch is for
        # Of streams of collectives alone: a launch joins all that was computed before it.
        self._accesses: defaultdict[int, list[Access]] = defaultdict(list)
        self._held: list[tuple[Tensor, ...]] = []  # so that no other memory gets the same address
        self._works: list[PlayedWork] = []
        self._nothing: set[int] = set()  # storages that parameters of freed units show
        self._launch: PlayedWork | None = None  # which holds several calls
        self._is_in_backend = False

    def knows(self, engine: Engine) -> None:
        """Count every use of what parameters of freed units show as wrong."""
        for unit in engine.units:
            for held in unit.held:
                self._nothing |= {each.untyped_storage()._cdata for each in held.nan_views}

    @property
    def streams(self) -> set[str]:
        """Those of collectives."""
        return {work.stream for work in self._works}

    def never_waited(self) -> list[str]:
        """What was launched and is in flight for ever: what it brings is taken by nobody."""
        return [work.what for work in self._works if not work.is_waited]

    # -- what the compute stream does ---------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_in_backend and not func.is_view:
            with unguarded():
                self._compute(func, args, kwargs)
        return func(*args, **kwargs)

    def _compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        name = func.name().partition("::")[2].partition(".")[0]
        if name.startswith(OF_SIZES):
            return
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    stream = HOST if on_host.is_entered else COMPUTE
                    self.touch(stream, tensor, writes=writes, by=name)

    def free(self, storage: torch.UntypedStorage) -> None:
        self._expect_order(
            storage._cdata, Access(0, storage.nbytes(), COMPUTE, 0, True, "to free it")
        )

    def touch(
        self, stream: str, tensor: Tensor, *, writes: bool, by: str, beside: bool = False
    ) -> None:
        """Note an access; `beside`: the host does not wait for it, though it is on the compute stream."""
        if tensor.numel() == 0:
            return
        storage = tensor.untyped_storage()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        start = int(tensor.storage_offset()) * tensor.itemsize
        last = sum((size - 1) * step for size, step in steps)
        stop = start + (1 + int(last)) * tensor.itemsize
        if storage.nbytes() < stop or storage._cdata in self._nothing:
            self.problems.append(f"{by} uses memory that is freed")
            assert storage.nbytes() >= stop, self.problems[-1]
        access = Access(start, stop, stream, self.clocks[stream][stream], writes, by)
        self._expect_order(storage._cdata, access)
        if beside or stream not in (COMPUTE, HOST):
            self._accesses[storage._cdata].append(access)

    def copy_over(self, target: Tensor, source: Tensor) -> None:
        """Copy between device and host on the compute stream, beside the host."""
        with unguarded():
            self.clocks[COMPUTE] |= self.clocks[HOST]
            self.clocks[COMPUTE][COMPUTE] += 1
            for tensor, writes in ((target, True), (source, False)):
                self.touch(COMPUTE, tensor, writes=writes, by="a copy over the bus", beside=True)
            self._held.append((target, source))
            with self.in_backend(), torch.no_grad():
                target.copy_(source)

    def mark(self, device: torch.device) -> PlayedMark:
        return PlayedMark(self, self.clocks[COMPUTE].copy())

    def _expect_order(self, storage: int, access: Access) -> None:
        seen = self.clocks[access.stream]
        for other in self._accesses.get(storage, ()):
            overlap = access.start < other.stop and other.start < access.stop
            if overlap and (access.writes or other.writes) and other.tick > seen[other.stream]:
                self.problems.append(
                    f"{access.by} {_verb(access)} what {other.by} {_verb(other)}, unwaited"
                )

    # -- what collectives do ------------------------------------------------------------------------

    def launch(self, name: str, call: Callable[..., Any], tensors: Any, options: Any) -> Any:
        """Note a call of torch.distributed and make it; several calls may be one launch."""
        group = options.get("group") or dist.group.WORLD
        stream = group.group_name
        self.clocks[stream] |= self.clocks[COMPUTE]
        self.clocks[stream][stream] += 1
        by = f"{name} of {self.what}"
        written, read = WRITES_AND_READS.get(name, ((), ()))
        if root := ROOTED.get(name):
            mine = options[root] == dist.get_rank(group)
            written, read = ((0,), ()) if mine == (name == "reduce") else ((), (0,))
        for indices, writes in ((written, True), (read, False)):
            for index in indices:
                self.touch(stream, tensors[index], writes=writes, by=by)
        of_all = dist.get_world_size(group) == dist.get_world_size()
        self.launches.append((self.what, name, tensors[0].numel() if of_all else 0))
        self._held.append(tuple(t for t in tensors if isinstance(t, Tensor)))
        work = self._launch or PlayedWork(self, stream)
        work.clock |= self.clocks[stream]
        with self.in_backend():
            began = call(*tensors, **options)
        if began is None:  # the call has waited
            self.clocks[COMPUTE] |= work.clock
            return None
        work.works.append(began)
        work.what = by
        if work is not self._launch:
            self._works.append(work)
        return work

    @contextmanager
    def in_backend(self) -> Iterator[None]:
        """What the backend does inside is no kernel of ours: gloo copies, where NCCL has its own stream."""
        self._is_in_backend = True
        try:
            yield
        finally:
            self._is_in_backend = False

    @contextmanager
    def one_launch(self, group: Any, *_: Any, **__: Any) -> Iterator[PlayedWork]:
        self._launch = PlayedWork(self, group.group_name)
        self._works.append(self._launch)
        try:
            yield self._launch
        finally:
            self._launch = None


def _verb(access: Access) -> str:
    return "writes" if access.writes else "reads"


@contextmanager
def played_device() -> Iterator[PlayedDevice]:
    """Everything inside happens on a played device."""
    device = PlayedDevice()
    record, resize = Moves.record_collective, torch.UntypedStorage.resize_

    def recording(moves: Moves, what: str) -> None:
        device.what = what
        record(moves, what)

    def resizing(storage: torch.UntypedStorage, size: int) -> Any:
        if size < storage.nbytes():
            device.free(storage)
        return resize(storage, size)

    def playing(name: str) -> Callable[..., Any]:
        call = getattr(dist, name)
        return lambda *tensors, **options: device.launch(name, call, tensors, options)

    def reading(world: World, tensor: Tensor) -> Callable[[], list[float]]:
        device.touch(COMPUTE, tensor, writes=False, by="a copy to the host")
        return read_later(world, tensor)

    read_later = World.read_later
    names = [name for name in (*WRITES_AND_READS, *ROOTED) if hasattr(dist, name)]
    calls: dict[str, Any] = {name: playing(name) for name in names}
    with (
        mock.patch.multiple(dist, **calls, _coalescing_manager=device.one_launch),
        mock.patch.object(Moves, "record_collective", recording),
        mock.patch.object(World, "read_later", reading),
        mock.patch.object(torch.UntypedStorage, "resize_", resizing),
        mock.patch.multiple(bus, copy_over=device.copy_over, mark=device.mark),
        device,
    ):
        yield device
