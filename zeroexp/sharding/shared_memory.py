"""Ranks on one host read each other's memory instead of sending it.

Every rank owns one arena, mapped by all its neighbours:

    | parameters at rest ...                          | slot 0 | slot 1 |
      offered: neighbours copy straight out of them     gradients on their way, one reduction a slot

A message is a few words over a Unix socket: a tag and where in the sender's arena the data lies. What lies in a slot
is answered when it has been read, and only then is the slot written again. What is *offered* may be read as often as
wanted, without a word, until both sides say that they are done with this step's offers: only then is it overwritten.
A system call lies between writing the data and announcing it, which orders the memory.

Loopback TCP would copy everything twice through the kernel and wake a thread for each message, on cores that are
busy computing: at two ranks on two cores it costs a fifth of the step, this a twentieth.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import uuid
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.sharding.channels import Arrival
from zeroexp.sharding.layout import aligned, pages
from zeroexp.world import World, host_identity

NO_TAG = -1

# What a message says. After it come a tag and offsets in the sender's arena.
_STAGED = 0  # the tensors of this tag lie in a slot
_READ = 1  # I have read your slot of this tag
_OFFERED = 2  # the tensors of this tag may be read until both are done
_DONE = 3  # I read none of your offers any more


class Neighbourhood:
    """The ranks of one host: their sockets, their arenas, and mine."""

    def __init__(self, world: World, timeout_seconds: float):
        address = f"\0zeroexp-{uuid.uuid4()}"  # abstract: no file to leave behind
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen(world.size)
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, (host_identity(), address))
        same_host = [r for r, (host, _) in enumerate(everyone) if host == host_identity()]
        self.peers = [rank for rank in same_host if rank != world.rank]
        self._sockets = _connect(world.rank, self.peers, [a for _, a in everyone], listener)
        for each in self._sockets.values():
            each.settimeout(timeout_seconds)

    def open(self, arena: Arena) -> dict[int, SharedChannel]:
        """Show my arena, map everybody else's: a channel for each neighbour. All neighbours call it together."""
        channels: dict[int, SharedChannel] = {}
        for peer in self.peers:
            message = struct.pack("q", arena.num_bytes)
            socket.send_fds(self._sockets[peer], [message], [arena.file])
        for peer in self.peers:
            message, files, _, _ = socket.recv_fds(self._sockets[peer], 8, 1)
            theirs = _map(files[0], struct.unpack("q", message)[0])
            os.close(files[0])  # the mapping holds it
            channels[peer] = SharedChannel(self._sockets[peer], peer, arena, theirs)
        arena.channels = list(channels.values())
        return channels


class Arena:
    """Anonymous shared memory of one rank: a stack of resting tensors, then slots in turn."""

    def __init__(self, rest_bytes: int, slot_bytes: int, num_slots: int):
        self.staging_bytes = num_slots * slot_bytes
        self.num_bytes = max(pages(rest_bytes) + self.staging_bytes, mmap.PAGESIZE)
        self.file = os.memfd_create("zeroexp")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.num_bytes)
        self._mapping = mmap.mmap(self.file, self.num_bytes)
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.channels: list[SharedChannel] = []
        self._top = 0
        self._slots = [pages(rest_bytes) + i * slot_bytes for i in range(num_slots)]
        self._tags = [NO_TAG] * num_slots  # whose data each slot holds
        self._slot = 0
        self._written = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A resting tensor with a storage and pages of its own; an arena's memory is never given back piecewise."""
        start = self._top
        self._top += pages(numel * dtype.itemsize)
        assert self._top <= self._slots[0], "the arena was opened for fewer bytes"
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=start)

    def offset_of(self, tensor: Tensor) -> int:
        """Where a resting tensor lies."""
        offset = tensor.data_ptr() - self.memory.data_ptr() if tensor.numel() else 0
        assert 0 <= offset < self.num_bytes, "only what lies in the arena can be offered"
        return offset

    def stage(self, tag: int, tensors: Sequence[Tensor]) -> list[int]:
        """Copy tensors into the slot of this tag; the first call of a tag waits for a slot nobody reads."""
        if self._tags[self._slot] != tag:
            self._slot, self._written = self._free_slot(), 0
            self._tags[self._slot] = tag
        offsets: list[int] = []
        for tensor in tensors:
            start = self._slots[self._slot] + self._written
            self.memory[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor)
            offsets.append(start)
            self._written += aligned(tensor.nbytes)
        return offsets

    def _free_slot(self) -> int:
        while True:
            for slot, tag in enumerate(self._tags):
                if not any(channel.is_unread(tag) for channel in self.channels):
                    return slot
            self._read_any_message()

    def _read_any_message(self) -> None:
        poll = select.poll()  # unlike select, for file descriptors of any number
        by_file = {channel.fileno(): channel for channel in self.channels}
        for file in by_file:
            poll.register(file, select.POLLIN)
        timeout = self.channels[0].timeout
        ready = poll.poll(None if timeout is None else 1000 * timeout)
        if not ready:
            raise TimeoutError("no neighbour has read what it was sent")
        for file, _ in ready:
            by_file[file].read_message()


class SharedChannel:
    """To one neighbour: where my data lies; from it: where its data lies."""

    def __init__(self, connection: socket.socket, peer: int, arena: Arena, theirs: Tensor):
        self._socket = connection
        self._peer = peer
        self._arena = arena
        self._theirs = theirs
        self._inbox: dict[int, list[int]] = {}  # tag -> offsets in the peer's slots
        self._offers: dict[int, list[int]] = {}  # tag -> offsets of the peer's tensors at rest
        self._peer_is_done = False
        self._unread: set[int] = set()  # tags of mine the peer has not read yet

    def send(self, tag: int, tensors: Sequence[Tensor]) -> list[Any]:
        offsets = self._arena.stage(tag, tensors)
        self._unread.add(tag)
        self._say(_STAGED, tag, offsets)
        return []

    def receive(self, tag: int, like: Sequence[Tensor], *, into: bool) -> Arrival:
        def wait() -> list[Tensor]:
            while tag not in self._inbox:
                self.read_message()
            views = self._views(self._inbox.pop(tag), like)
            if into:
                for target, view in zip(like, views, strict=True):
                    target.copy_(view)
            return views

        def release() -> None:
            self._say(_READ, tag)

        return Arrival(wait, release)

    def offer(self, tag: int, tensors: Sequence[Tensor]) -> None:
        """Tensors at rest in my arena that will not change before `end_offers`."""
        self._say(_OFFERED, tag, [self._arena.offset_of(tensor) for tensor in tensors])

    def copy_offered(self, tag: int, targets: Sequence[Tensor]) -> None:
        while tag not in self._offers:
            self.read_message()
        for target, view in zip(targets, self._views(self._offers[tag], targets), strict=True):
            target.copy_(view)

    def end_offers(self) -> None:
        """I read none of the peer's any more. `await_end` tells when it reads none of mine."""
        self._offers.clear()
        self._say(_DONE, 0)

    def await_end(self) -> None:
        while not self._peer_is_done:
            self.read_message()
        self._peer_is_done = False

    @property
    def timeout(self) -> float | None:
        return self._socket.gettimeout()

    def fileno(self) -> int:
        return self._socket.fileno()

    def is_unread(self, tag: int) -> bool:
        return tag in self._unread

    def read_message(self) -> None:
        message = self._socket.recv(1 << 16)
        if not message:
            raise ConnectionError(f"rank {self._peer} has left")
        kind, tag, *offsets = struct.unpack(f"{len(message) // 8}q", message)
        if kind == _READ:
            self._unread.discard(tag)
        elif kind == _DONE:
            self._peer_is_done = True
        else:
            {_STAGED: self._inbox, _OFFERED: self._offers}[kind][tag] = offsets

    def _say(self, kind: int, tag: int, offsets: Sequence[int] = ()) -> None:
        self._socket.send(struct.pack(f"{2 + len(offsets)}q", kind, tag, *offsets))

    def _views(self, offsets: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of these sizes in the peer's arena."""
        return [
            self._theirs[start : start + tensor.nbytes].view(tensor.dtype)
            for start, tensor in zip(offsets, like, strict=True)
        ]


def _connect(
    rank: int, peers: Sequence[int], addresses: Sequence[str], listener: socket.socket
) -> dict[int, socket.socket]:
    """One socket for each neighbour: the higher rank calls, and says who it is."""
    sockets: dict[int, socket.socket] = {}
    for peer in peers:
        if peer < rank:
            sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sockets[peer].connect(addresses[peer])
            sockets[peer].send(struct.pack("q", rank))
    while len(sockets) < len(peers):
        connection, _ = listener.accept()
        sockets[struct.unpack("q", connection.recv(8))[0]] = connection
    listener.close()
    return sockets


def _map(file: int, num_bytes: int) -> Tensor:
    """A neighbour's arena, for reading."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nobody writes there
        mapping = mmap.mmap(file, num_bytes, access=mmap.ACCESS_READ)
        return torch.frombuffer(mapping, dtype=torch.uint8)
