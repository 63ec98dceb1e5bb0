"""The bus between a rank's device and its host: what rests on the host, and the moves that it takes.

    device   sums of gradients ──to_host──┐                     ┌──to_device──▶ parameters
    host                                  └▶ transit ─▶ update ─┴ master weights

With `all` the pieces of parameters that rest sharded are on the host as well: masters become pieces there, and each
gather first takes its own piece over the bus. Where parameters rest as codes masters are the pieces: the host makes
their codes, which cross the bus once a step and rest on the device.

On a GPU the host's memory is pinned and copies are queued on the current stream, behind what makes their source and
before what reads their target. The host waits in two places: for gradients before it updates, and in `settle`, before
anybody else writes what a copy to the device may still read. (These lines have run on no GPU; tests/device_order.py
plays one and tests both waits.)

On a CPU one memory plays both. What is allocated `on_host` counts apart, and the copies are made and counted as on a
GPU; nothing is saved there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zeroexp.comm.base import GatherPart
from zeroexp.comm.facts import ALL
from zeroexp.interface.strategy import ModelStates
from zeroexp.measure.memory import on_host
from zeroexp.measure.verb_seconds import meter
from zeroexp.process.world import World

# Master weights that an optimizer updates, each with its gradient.
Updates = Sequence[tuple[Tensor, Tensor]]


class Bus:
    """The bus of one engine; where nothing is offloaded, each method does what a single memory needs."""

    def __init__(
        self,
        world: World,
        offload: str | None,
        count: Callable[[str, int], None],
        *,
        codes_rest: bool = False,
    ):
        """count: is told each move, `to_host` or `to_device`, and its bytes."""
        self.is_used = offload is not None
        self.keeps_pieces = offload == ALL or (self.is_used and codes_rest)
        self._is_on_gpu = world.device.type == "cuda" and not world.is_fake
        self._count = count
        self._memory: list[Tensor] = []  # all that masters and transit lie in
        # By master: where its gradient arrives, and from where its parameter leaves in another dtype.
        self._transit: dict[Tensor, Tensor] = {}
        self._last_copy: Mark | None = None

    @contextmanager
    def on_host(self) -> Generator[None]:
        """What is allocated inside lies on the host, as moments that an optimizer makes like its masters do."""
        if not self.is_used:
            yield
            return
        with on_host.entered():
            yield

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what rests on the host, where anything does."""
        if not self.is_used:
            return torch.empty(numel, dtype=dtype, device=device)
        with on_host.entered():
            memory = torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._is_on_gpu)
        self._memory.append(memory)
        return memory

    def connect(self, masters: Sequence[Tensor], compute: torch.dtype, reduce: torch.dtype) -> None:
        """Take up the memory through which gradients of these masters come and their parameters go."""
        if not self.is_used:
            return
        leaving = [] if self.keeps_pieces else [m for m in masters if m.dtype != compute]
        itemsizes = [reduce.itemsize, *(compute.itemsize for _ in leaving)]
        sizes = [max(itemsizes) * master.numel() for master in masters]
        memory = self.empty(sum(sizes), torch.uint8, torch.device("cpu"))
        self._transit.update(zip(masters, memory.split(sizes), strict=True))

    def to_host(self, updates: Updates) -> None:
        """Start to copy the gradients to the host; `gradients` waits for them."""
        if not self.is_used:
            return
        with meter.issuing("to_host", "gradients"):
            for master, gradient in updates:
                copy_over(self._transit_of(master, gradient), gradient)
            self._last_copy = Mark(is_on_gpu=self._is_on_gpu)
        self._count("to_host", sum(gradient.nbytes for _, gradient in updates))

    def gradients(self, updates: Updates) -> list[Tensor]:
        """Return the gradients where the masters are, in their dtypes."""
        if not self.is_used:
            return [gradient for _, gradient in updates]
        self.settle()
        arrived = ((m, self._transit_of(m, gradient)) for m, gradient in updates)
        return [gradient.to(master.dtype) for master, gradient in arrived]

    def to_device(self, parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Write the masters into the parameters, in the dtype of these."""
        if not self.is_used or self.keeps_pieces:
            with self.on_host():
                torch._foreach_copy_(list(parameters), list(masters))
            return
        for parameter, master in zip(parameters, masters, strict=True):
            source = master
            if master.dtype != parameter.dtype:  # cast before the bus, which carries fewer bytes so
                with on_host.entered():
                    source = self._transit_of(master, parameter).copy_(master)
            copy_over(parameter, source)
        self._last_copy = Mark(is_on_gpu=self._is_on_gpu)
        self._count("to_device", sum(parameter.nbytes for parameter in parameters))

    def brought(self, made: Tensor, device: torch.device) -> Tensor:
        """Return on the device what was made where the masters are."""
        if not self.is_used:
            return made
        there = torch.empty_like(made, device=device)
        copy_over(there, made)
        self._last_copy = Mark(is_on_gpu=self._is_on_gpu)
        self._count("to_device", there.nbytes)
        return there

    def pieces_to_device(self, parts: Sequence[GatherPart], rank: int) -> Sequence[GatherPart]:
        """Return the parts of a gather with this rank's pieces in their place in the full parameters."""
        if not self.keeps_pieces:
            return parts
        there = [GatherPart(p.chunk, p.full, p.full[p.chunk.section(rank)]) for p in parts]
        for part, target in zip(parts, there, strict=True):
            copy_over(target.piece, part.piece)
        self._last_copy = Mark(is_on_gpu=self._is_on_gpu)
        self._count("to_device", sum(part.piece.nbytes for part in parts))
        return there

    def settle(self) -> None:
        """Return when no copy is under way: what was on its way to the host is there, and masters may be written."""
        if self._last_copy is not None:
            self._last_copy.wait()

    def counted_apart(self, states: ModelStates) -> ModelStates:
        """Return the states with those that rest on the host as a kind of their own."""
        if self.is_used:
            states.host = [*self._memory, *states.optimizer]
            states.master, states.optimizer = [], []
            here = set(map(id, self._memory))
            states.parameters = [each for each in states.parameters if id(each) not in here]
        return states

    def _transit_of(self, master: Tensor, like: Tensor) -> Tensor:
        """Return the master's transit as a tensor like this one."""
        return self._transit[master][: like.nbytes].view(like.dtype).view(like.shape)


def copy_over(target: Tensor, source: Tensor) -> None:
    """Queue a copy over the bus; memory of the host is pinned on both ways."""
    with on_host.entered(), torch.no_grad():
        target.copy_(source, non_blocking=True)


class Mark:
    """A place in the current stream, for which the host can wait; on a CPU all has happened already."""

    def __init__(self, *, is_on_gpu: bool) -> None:
        self._event = torch.cuda.Event() if is_on_gpu else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return when all that was queued before the mark has been done."""
        if self._event is not None:
            self._event.synchronize()
