"""Tensors travel from one rank to one peer by the two channels of the direct transport.

GlooChannel       messages over the process group, for peers on other hosts
SharedChannel     (shared_memory.py) memory that both processes map, for peers on the same host: nothing is sent,
                  the peer reads the tensors in the sender's memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroexp.comm.base import WatchedWork
from zeroexp.process.watchdog.differs import Moves

SEGMENT_BYTES = 4 << 20  # longer tensors travel in segments: 200 MB take half the time
PACK_BELOW_BYTES = 32 << 10  # shorter tensors are packed together: gloo costs ~40 us a message


@dataclass
class ReceivedTensors:
    """Tensors on their way from one peer. They may be read after `wait` and until `release`."""

    wait: Callable[[], list[Tensor]]
    release: Callable[[], None]


class Channel(Protocol):
    """Carries one-dimensional tensors to and from one peer. Both sides list the same sizes under the same tag."""

    def send(
        self, tag: int, tensors: Sequence[Tensor], what: str, dtype: torch.dtype | None = None
    ) -> list[Any]:
        """Send the tensors, and return works to wait for before they may change. Errors name them by `what`.

        dtype: in which they travel, for which the peer has room; None: their own.
        """
        ...

    def receive(
        self, tag: int, like: Sequence[Tensor], what: str, *, into: bool
    ) -> ReceivedTensors:
        """Receive tensors as large as those in `like`; with `into` they are written to the memory of `like`."""
        ...


class GlooChannel:
    """Point-to-point messages of gloo, straight from and into the tensors."""

    def __init__(self, peer: int, moves: Moves):
        """peer: its number among all ranks."""
        self._peer, self._moves = peer, moves

    def send(
        self, tag: int, tensors: Sequence[Tensor], what: str, dtype: torch.dtype | None = None
    ) -> list[Any]:
        messages = _messages(tensors if dtype is None else [each.to(dtype) for each in tensors])
        buffers = [m[0] if len(m) == 1 else torch.cat(_bytes_of(m)) for m in messages]
        group = self._moves.world.process_group
        return [self._watched(group.send([b], self._peer, tag), b, what) for b in buffers]

    def receive(
        self, tag: int, like: Sequence[Tensor], what: str, *, into: bool
    ) -> ReceivedTensors:
        targets = list(like) if into else [torch.empty_like(tensor) for tensor in like]
        works: list[Any] = []
        packed: list[tuple[Tensor, list[Tensor]]] = []
        for message in _messages(targets):
            buffer = message[0]
            if len(message) > 1:
                buffer = buffer.new_empty(sum(t.nbytes for t in message), dtype=torch.uint8)
                packed.append((buffer, message))
            work = self._moves.world.process_group.recv([buffer], self._peer, tag)
            works.append(self._watched(work, buffer, what))

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            for buffer, message in packed:
                parts = buffer.split_with_sizes([tensor.nbytes for tensor in message])
                for target, part in zip(_bytes_of(message), parts, strict=True):
                    target.copy_(part)
            return targets

        return ReceivedTensors(wait, release=lambda: None)

    def _watched(self, work: Any, buffer: Tensor, what: str) -> WatchedWork:
        return WatchedWork(work, self._moves, [buffer], peer=self._peer, what=what)


def _messages(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut long tensors in segments and put all short ones in one last message, alike on both sides."""
    messages: list[list[Tensor]] = []
    short: list[Tensor] = []
    for tensor in tensors:
        if tensor.nbytes < PACK_BELOW_BYTES:
            short.extend([tensor] if tensor.numel() else [])
        else:
            messages.extend([segment] for segment in tensor.split(SEGMENT_BYTES // tensor.itemsize))
    return [*messages, short] if short else messages


def _bytes_of(message: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.view(torch.uint8) for tensor in message]
