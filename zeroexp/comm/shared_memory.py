"""Ranks on one host read each other's memory instead of sending it.

Every rank owns one arena, mapped by all its neighbours:

    | parameters at rest ...                          | slot 0 | slot 1 |
      exposed: neighbours copy straight out of them     gradients on their way, one reduction a slot

The sender writes into its control block where the data lie (control_block.py) and wakes the reader (wake_up.py). The
reader of a slot says in its own control block that it has read it, and only then does the sender write the slot again.
What is *exposed* may be read any number of times without an answer; it is overwritten only when both sides have said
that they are done with this step's exposures. A rank that writes its control block never waits for readers, so any
number of units may be exposed.

Loopback TCP would copy everything twice through the kernel and wake a thread for each message, on cores that are
busy computing. With two ranks on two cores TCP costs a fifth of the step, shared memory a twentieth.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroexp.comm.control_block import ControlBlock, OwnControlBlock
from zeroexp.comm.point_to_point import ReceivedTensors
from zeroexp.comm.shared_memory_sizes import aligned, arena_bytes
from zeroexp.comm.wake_up import WakeUpPipes
from zeroexp.process.watchdog.differs import Moves

NO_TAG = 0


def neighbour_identity() -> tuple[Any, ...]:
    """Return a value that is equal for processes of one boot of a machine that may open each other's memory.

    Those of two network namespaces may too, and are two nodes: what crosses between them is to cross the link.
    Whether the kernel really lets them is found out with a `Probe`.
    """
    try:
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("user", "pid", "net")]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
        return boot.strip(), os.geteuid(), *spaces
    except OSError:  # as where /proc shows processes alone
        return os.uname().nodename, os.geteuid()


def own_folder() -> str:
    """Return where others open files of this process: its number in /proc, which may count another namespace's."""
    return f"/proc/{os.readlink('/proc/self')}/fd"


class Probe(NamedTuple):
    """A file that ranks of a host open of each other before they rely on it: where it is, and what it holds."""

    path: str
    content: bytes

    def problem(self) -> str:
        """Return why this process can not open the file; nothing if it can."""
        try:
            is_it = Path(self.path).read_bytes() == self.content
            return "" if is_it else f"{self.path} is another file"
        except OSError as error:
            return error.strerror or str(error)


@contextmanager
def shown_probe() -> Generator[Probe]:
    """Show a file to other ranks as an arena is shown; where there can be none, one that nobody can open."""
    with ExitStack() as opened:
        content = os.urandom(16)
        try:
            file = os.memfd_create("zeroexp-probe")
            opened.callback(os.close, file)
            os.write(file, content)
            path = f"{own_folder()}/{file}"
        except OSError as error:
            path = f"no file, for {error.strerror}"
        yield Probe(path, content)


class Shown(NamedTuple):
    """What the neighbours of a rank open: the folder of its files, and their numbers."""

    folder: str
    memory: int
    control: int
    pipes: Mapping[int, int]  # by the rank that writes there


class Arena:
    """Anonymous shared memory of one rank: a stack of resting tensors, followed by slots for reductions."""

    def __init__(
        self,
        moves: Moves,
        peers: Sequence[int],
        resting: Sequence[int],
        slot_bytes: int,
        num_slots: int,
    ):
        """peers: the neighbours, numbered among all ranks. resting: the bytes of each tensor that `empty` will be
        asked for.
        """
        self._rank, self._num_ranks = moves.world.rank, moves.world.size
        self.staging_bytes = num_slots * slot_bytes
        rest_bytes = sum(map(aligned, resting))
        self.num_bytes = arena_bytes(resting, slot_bytes, num_slots)
        self.file = os.memfd_create("zeroexp")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.num_bytes)
        self._mapping = mmap.mmap(self.file, self.num_bytes)
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.channels: list[SharedChannel] = []
        self.control = OwnControlBlock(self._num_ranks)
        self.wake_up = WakeUpPipes(moves, peers)
        self.step = 1  # 1 + calls of `quiesce`, the same on every rank
        self._top = 0
        self._slots = [rest_bytes + i * slot_bytes for i in range(num_slots)]
        self._tags = [NO_TAG] * num_slots  # slot -> tag of the data in it
        self._slot = 0
        self._written = 0

    @property
    def shown(self) -> Shown:
        return Shown(own_folder(), self.file, self.control.file, self.wake_up.pipes)

    def channel_to(self, peer: int, shown: Shown) -> SharedChannel:
        """Return the channel to a neighbour, whose files are opened anew: the kernel lets those of one user do so."""
        folder = shown.folder
        try:
            self.wake_up.add(peer, f"{folder}/{shown.pipes[self._rank]}")
            with (
                open(f"{folder}/{shown.memory}", "rb") as memory,
                open(f"{folder}/{shown.control}", "rb") as control,
            ):
                words = ControlBlock(control.fileno(), self._num_ranks)
                channel = SharedChannel(self._rank, peer, self, _map(memory.fileno()), words)
        except OSError as error:
            raise ConnectionError(
                f"rank {self._rank} can not open the memory of rank {peer} ({error.strerror})"
            ) from error
        self.channels.append(channel)
        return channel

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a resting tensor with its own storage. It is freed only with the whole arena."""
        start = self._top
        self._top += aligned(numel * dtype.itemsize)
        assert self._top <= self._slots[0], "the arena was opened for fewer bytes"
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=start)

    def expose(self, exposure: int, tensors: Sequence[Tensor]) -> None:
        """Promise that these resting tensors, always the same, will not change before `quiesce`."""
        self.control.post_exposed(exposure, self.step, [self.offset_of(t) for t in tensors])
        self.wake_up.wake_all()

    def quiesce(self) -> None:
        """Return when no neighbour reads this rank's exposures any more; this rank reads none of theirs from now on."""
        self.control.post_ended_steps(self.step)
        self.step += 1
        self.wake_up.wake_all()
        for channel in self.channels:
            channel.await_end()

    def offset_of(self, tensor: Tensor) -> int:
        """Return the offset in bytes of a resting tensor in the arena; 0 for an empty one."""
        offset = tensor.data_ptr() - self.memory.data_ptr() if tensor.numel() else 0
        assert 0 <= offset < self.num_bytes, "only what lies in the arena can be exposed"
        return offset

    def stage(
        self, tag: int, tensors: Sequence[Tensor], what: str, dtype: torch.dtype | None = None
    ) -> tuple[int, int]:
        """Copy tensors into the slot of this tag; the first call for a tag waits for a slot that nobody reads.

        dtype: to which the copies are cast; None: the tensors' own.

        Returns the slot and the offset of the first tensor; the others follow it, each aligned.
        """
        if self._tags[self._slot] != tag:
            self._slot, self._written = self._free_slot(what), 0
            self._tags[self._slot] = tag
        first = self._slots[self._slot] + self._written
        for tensor in tensors:
            start = self._slots[self._slot] + self._written
            there = dtype or tensor.dtype
            num_bytes = tensor.numel() * there.itemsize
            self.memory[start : start + num_bytes].view(there).copy_(tensor)
            self._written += aligned(num_bytes)
        return self._slot, first

    def _free_slot(self, what: str) -> int:
        def free() -> int | None:
            slots = (slot for slot, tag in enumerate(self._tags) if not self._readers(slot, tag))
            return next(slots, None)

        slot, tag = min(enumerate(self._tags), key=lambda each: each[1])  # the oldest data
        reader, *_ = [*self._readers(slot, tag), self._rank]  # nobody is waited for if all have
        return self.wake_up.wait_for(free, reader, f"it to read what was sent before {what}")

    def _readers(self, slot: int, tag: int) -> list[int]:
        """Return the neighbours that have not read the data of this tag yet."""
        return [channel.peer for channel in self.channels if channel.is_unread(slot, tag)]


class SharedChannel:
    """The channel to one neighbour: each side tells where its data lie, and the other side reads them there."""

    def __init__(self, rank: int, peer: int, arena: Arena, theirs: Tensor, control: ControlBlock):
        self.peer = peer
        self._rank = rank
        self._arena = arena
        self._wake_up = arena.wake_up
        self._theirs = theirs
        self._control = control
        self._sent: dict[int, int] = {}  # slot -> tag of the data that the peer is to read there

    def send(
        self, tag: int, tensors: Sequence[Tensor], what: str, dtype: torch.dtype | None = None
    ) -> list[Any]:
        slot, offset = self._arena.stage(tag, tensors, what, dtype)
        self._sent[slot] = tag
        self._arena.control.post_staged(self.peer, slot, tag, offset)
        self._wake_up.wake(self.peer)
        return []

    def receive(
        self, tag: int, like: Sequence[Tensor], what: str, *, into: bool
    ) -> ReceivedTensors:
        def staged() -> tuple[int, int] | None:
            return self._control.find_staged(self._rank, tag)

        def wait() -> list[Tensor]:
            _, offset = self._wake_up.wait_for(staged, self.peer, what)
            views = self._views(_side_by_side(offset, like), like)
            if into:
                for target, view in zip(like, views, strict=True):
                    target.copy_(view)
            return views

        def release() -> None:
            place = staged()
            assert place is not None, "released before it was read"
            self._arena.control.post_read(self.peer, place[0], tag)
            self._wake_up.wake(self.peer)

        return ReceivedTensors(wait, release)

    def copy_exposed(self, exposure: int, targets: Sequence[Tensor], what: str) -> None:
        step = self._arena.step
        offsets = self._wake_up.wait_for(
            lambda: self._control.exposed_offsets(exposure, step), self.peer, what
        )
        for target, view in zip(targets, self._views(offsets, targets), strict=True):
            target.copy_(view)

    def await_end(self) -> None:
        """Wait until the peer no longer reads exposures of steps that this rank has ended."""
        ended = self._arena.step - 1
        what = "it to be done with this step's parameters"
        self._wake_up.wait_for(
            lambda: self._control.num_ended_steps >= ended or None, self.peer, what
        )

    def is_unread(self, slot: int, tag: int) -> bool:
        return self._sent.get(slot) == tag != self._control.tag_read(self._rank, slot)

    def _views(self, offsets: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
        """Return views of the peer's arena at these offsets, as large as the tensors in `like`."""
        return [
            self._theirs[start : start + tensor.nbytes].view(tensor.dtype)
            for start, tensor in zip(offsets, like, strict=True)
        ]


def _side_by_side(offset: int, like: Sequence[Tensor]) -> list[int]:
    """Return the offsets of tensors as large as those in `like`, one after the other from `offset`, each aligned."""
    offsets: list[int] = []
    for tensor in like:
        offsets.append(offset)
        offset += aligned(tensor.nbytes)
    return offsets


def _map(file: int) -> Tensor:
    """Map a neighbour's arena for reading."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # we only read
        mapping = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        return torch.frombuffer(mapping, dtype=torch.uint8)
