"""The bus between a rank's device and its host: what rests on the host, and the moves that it takes.

    device   sums of gradients ──to_host──┐                     ┌──to_device──▶ parameters
    host                                  └▶ transit ─▶ update ─┴ master weights

A chunk whose `on_host` is set has its masters there. With `all` its pieces are there too, where parameters rest
sharded: masters become pieces there, and each gather first takes its own piece over the bus. Where parameters rest as
codes masters are the pieces: the host makes their codes, which cross the bus once a step and rest on the device.
Masters, moments and pieces may lie in a file that is mapped into the host's memory (offload_file.py), and the transit
does not.

On a GPU the host's memory is pinned (a file's is not) and copies are queued on the current stream, behind what makes
their source and before what reads their target. The host waits in two places: for gradients before it updates, and in
`settle`, before anybody else writes what a copy to the device may still read. (These lines have run on no GPU;
tests/device_order.py plays one and tests both waits.)

On a CPU one memory plays both. What is allocated `on_host` counts apart, and the copies are made and counted as on a
GPU; nothing is saved there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroexp.comm.base import GatherPart
from zeroexp.comm.offload_file import MappedFile
from zeroexp.comm.traits import ON_DEVICE, ON_HOST, MoveOptions
from zeroexp.cut.chunk import Chunk
from zeroexp.interface.strategy import ModelStates
from zeroexp.measure.communication_overlap import meter
from zeroexp.measure.memory import on_host
from zeroexp.process.world import World

# Master weights that an optimizer updates, each with its gradient.
Updates = Sequence[tuple[Tensor, Tensor]]


class Bus:
    """The bus of one engine; where nothing is offloaded, each method does what a single memory needs."""

    def __init__(
        self,
        world: World,
        count: Callable[[str, int], None],
        options: MoveOptions,
    ):
        """count: is told each move, `to_host` or `to_device`, and its bytes."""
        folder = options.offload_folder
        self.is_used = options.offload is not None
        self._parts, self.keeps_pieces = options.host_parts, options.pieces_on_host
        self._is_whole, self._in_file = options.offload_fraction == 1, folder is not None
        self._device = world.device
        self._timed_device = world.timed_device
        self._count = count
        # In a fake world there is no file, and what it would hold counts as if it were there.
        self._file = MappedFile(folder) if folder and not world.is_fake else None
        self._place_of: dict[Tensor, int] = {}  # of masters on the host
        self._memory: list[Tensor] = []  # all that masters, pieces and transit lie in
        self._filed: list[Tensor] = []  # the part of it in the file, moments too
        self._moments: dict[tuple[Any, ...], Tensor] = {}  # those in the file
        # By master: where its gradient arrives, and from where its parameter leaves in another dtype.
        self._transit: dict[Tensor, Tensor] = {}
        self._last_copy: torch.cuda.Event | None = None

    # -- what rests on the host --------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for what rests on the host."""
        if not self._in_file:
            return self._empty(numel, dtype)
        self._memory.append(self._empty_in_file(numel * dtype.itemsize).view(dtype))
        return self._memory[-1]

    def has_masters(self, chunk: Chunk) -> bool:
        """Whether masters of a chunk lie on the host."""
        return chunk.on_host and "master" in self._parts

    def connect(
        self, chunk: Chunk, masters: Sequence[Tensor], compute: torch.dtype, reduce: torch.dtype
    ) -> None:
        """Take up the memory through which gradients of masters on the host come and their parameters go."""
        if not self.has_masters(chunk):
            return
        last = max(self._place_of.values(), default=ON_DEVICE) if self._in_file else ON_DEVICE
        self._place_of.update(dict.fromkeys(masters, last + 1))
        leaving = [] if self.keeps_pieces else [m for m in masters if m.dtype != compute]
        itemsizes = [reduce.itemsize, *(compute.itemsize for _ in leaving)]
        sizes = [max(itemsizes) * master.numel() for master in masters]
        memory = self._empty(sum(sizes), torch.uint8)
        self._transit.update(zip(masters, memory.split(sizes), strict=True))

    @property
    def places(self) -> range:
        """The places of masters, in the order of their updates: the device's goes on while the host begins its own.

        In a file each chunk is a place, so that what an update allocates is that of one.
        """
        first = ON_HOST if self.is_used and self._is_whole else ON_DEVICE
        last = ON_HOST if self.is_used else ON_DEVICE
        return range(first, 1 + max([last, *self._place_of.values()]))

    def place_of(self, master: Tensor) -> int:
        return self._place_of.get(master, ON_DEVICE)

    def device_of(self, place: int) -> torch.device:
        return self._device if place == ON_DEVICE else torch.device("cpu")

    def at(self, place: int) -> AbstractContextManager[None]:
        """What is allocated inside lies where these masters do."""
        return nullcontext() if place == ON_DEVICE else on_host.entered()

    @contextmanager
    def keeping(
        self, masters: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]]
    ) -> Generator[None]:
        """What an optimizer's `state` gets inside for masters of one place lies where these do."""
        place = self.place_of(masters[0]) if masters else ON_DEVICE
        with self.at(place):
            yield
            if place != ON_DEVICE and self._in_file:
                self._put_in_file({master: state[master] for master in masters if master in state})

    def _put_in_file(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        found = {
            (master, name, tensor.dtype, tensor.shape): tensor
            for master, state in states.items()
            for name, tensor in state.items()
            # The number of steps, which an optimizer may read, stays as it made it.
            if isinstance(tensor, Tensor) and tensor.ndim
        }
        # Wide ones come first, so that each begins at a multiple of its own width.
        new = sorted((k for k in found if k not in self._moments), key=lambda k: -k[2].itemsize)
        sizes = [found[key].nbytes for key in new]
        parts = self._empty_in_file(sum(sizes)).split(sizes) if new else ()
        for key, part in zip(new, parts, strict=True):
            _, _, dtype, shape = key
            self._moments[key] = part.view(dtype).view(shape)
        for key, tensor in found.items():
            if (moment := self._moments[key]) is not tensor:
                master, name, *_ = key
                states[master][name] = moment.copy_(tensor)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        is_on_gpu = self._timed_device.type == "cuda"
        with on_host.entered():
            memory = torch.empty(numel, dtype=dtype, device="cpu", pin_memory=is_on_gpu)
        self._memory.append(memory)
        return memory

    def _empty_in_file(self, num_bytes: int) -> Tensor:
        with on_host.entered():
            take = self._file.take if self._file else partial(torch.empty, dtype=torch.uint8)
            self._filed.append(take(num_bytes))
        return self._filed[-1]

    # -- what moves --------------------------------------------------------------------------------

    def to_host(self, updates: Updates) -> None:
        """Start to copy the gradients of masters on the host there; `gradients` waits for them."""
        if not self.is_used:
            return
        moved = [(master, g) for master, g in updates if master in self._place_of]
        with meter.timing("to_host", "gradients"):
            self._carry(
                [(self._transit_of(m, gradient), gradient) for m, gradient in moved], "to_host"
            )

    def gradients(self, updates: Updates, place: int) -> list[Tensor]:
        """Return the gradients of a place where its masters are, in their dtypes."""
        if place == ON_DEVICE:
            return [gradient for _, gradient in updates]
        self.settle()
        arrived = ((m, self._transit_of(m, gradient)) for m, gradient in updates)
        return [gradient.to(master.dtype) for master, gradient in arrived]

    def write_parameters(
        self, parameters: Sequence[Tensor], masters: Sequence[Tensor], place: int
    ) -> None:
        """Write masters of a place into the parameters, in the dtype of these."""
        if place == ON_DEVICE or self.keeps_pieces:
            with self.at(place):
                torch._foreach_copy_(list(parameters), list(masters))
            return
        for parameter, master in zip(parameters, masters, strict=True):
            source = master
            if master.dtype != parameter.dtype:  # cast before the bus, which carries fewer bytes so
                with on_host.entered():
                    source = self._transit_of(master, parameter).copy_(master)
            copy_over(parameter, source)
        self._last_copy = mark(self._timed_device)
        self._count("to_device", sum(parameter.nbytes for parameter in parameters))

    def to_device(self, made: Tensor, device: torch.device) -> Tensor:
        """Return on the device what was made where the masters are."""
        if not self.is_used:
            return made
        there = torch.empty_like(made, device=device)
        self._carry([(there, made)], "to_device")
        return there

    def pieces_to_device(self, parts: Sequence[GatherPart], rank: int) -> Sequence[GatherPart]:
        """Return the parts of a gather with this rank's pieces of the host in their place in the full parameters."""
        if not self.keeps_pieces:
            return parts
        there = [
            GatherPart(p.chunk, p.full, p.full[p.chunk.section(rank)]) if p.chunk.on_host else p
            for p in parts
        ]
        moved = [pair for pair in zip(parts, there, strict=True) if pair[0] is not pair[1]]
        self._carry([(target.piece, part.piece) for part, target in moved], "to_device")
        return there

    def _carry(self, pairs: Sequence[tuple[Tensor, Tensor]], way: str) -> None:
        """Start to copy over the bus: to each target its source."""
        for target, source in pairs:
            copy_over(target, source)
        self._last_copy = mark(self._timed_device)
        self._count(way, sum(source.nbytes for _, source in pairs))

    def settle(self) -> None:
        """Return when no copy is under way: what was on its way to the host is there, and masters may be written."""
        if self._last_copy is not None:
            self._last_copy.synchronize()

    def counted_apart(self, states: ModelStates, kept: Mapping[Tensor, Any]) -> ModelStates:
        """Return the states, and what an optimizer keeps by master; what rests on the host is a kind of its own."""
        moments: list[Tensor] = []
        for master, state in kept.items():
            there = moments if master in self._place_of else states.optimizer
            there.extend(v for v in state.values() if isinstance(v, Tensor))
        if self.is_used:
            memory = {id(each) for each in self._memory}
            states.host = [*self._memory, *moments]
            states.master = [each for each in states.master if id(each) not in memory]
            states.parameters = [each for each in states.parameters if id(each) not in memory]
        if self._in_file:
            states.files = self._filed
            states.resident_bytes = self._file and self._file.resident_bytes()
        return states

    def _transit_of(self, master: Tensor, like: Tensor) -> Tensor:
        """Return the master's transit as a tensor like this one."""
        return self._transit[master][: like.nbytes].view(like.dtype).view(like.shape)


def copy_over(target: Tensor, source: Tensor) -> None:
    """Queue a copy over the bus; memory of the host is pinned on both ways."""
    with on_host.entered(), torch.no_grad():
        target.copy_(source, non_blocking=True)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Return a place in the device's stream, for which the host can wait; None on a CPU, where all has happened.

    The device need not be the current one, in a program of one rank.
    """
    event = torch.cuda.Event() if device.type == "cuda" else None
    if event is not None:
        event.record(torch.cuda.current_stream(device))
    return event
