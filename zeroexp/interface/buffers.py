"""Keep a module's buffers (BatchNorm's running statistics, counters) equal on all ranks, and save and load them.

Each rank computes its own buffers in forward. DistributedDataParallel sends rank 0's values with the first forward
after a step; this module sends them at the end of the step, and only those that changed on any rank:

    changes = buffers.changes()       per buffer: 0, or 1 if it changed here since the last sync
    (sum over ranks)                  with any all-reduce that happens anyway
    buffers.sync(changes)             one broadcast of the union, or none

A buffer has changed if its tensor has another version, another address, or was replaced (`self.n = self.n + 1`). Writes
that bypass the version (`self.mean.data.mul_()`) are found by comparing values in the first steps, and such a buffer is
sent in every later step. A buffer that is registered after the engine was built, or that changes shape, stays local to
each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroexp.interface.canonical import (
    BUFFER,
    canonical_whole,
    fill_from_canonical,
    require_covered,
)
from zeroexp.interface.strategy import CanonicalState, CanonicalTensor
from zeroexp.process import world as worlds
from zeroexp.process.world import World

NUM_COMPARED = 2  # number of first steps in which values are compared as well


@dataclass(eq=False)
class _Buffer:
    """One name of a buffer; a tensor with several names appears once under each."""

    name: str
    persistent: bool
    owner: nn.Module
    key: str
    seen: Tensor  # the tensor at the last sync; the reference keeps its identity from being reused
    version: int
    address: int
    values: Tensor | None  # a copy, in the first steps only
    always: bool = False  # was written without a new version

    @property
    def now(self) -> Tensor | None:
        return getattr(self.owner, self.key, None)


class Buffers:
    """The buffers of a module, in the same order on every rank; all ranks call each method together."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self._module, self._world = module, world
        self._num_compared = 0
        # A fake world has nobody to send to, and its buffers may have neither values nor addresses.
        self._buffers = [] if world.is_fake else _find(module)
        self._shapes = [(b.seen.shape, b.seen.dtype) for b in self._buffers]
        self._may_change = world.size > 1 and bool(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def any_persistent(self) -> bool:
        return any(buffer.persistent for buffer in self._buffers)

    def tensors(self) -> list[Tensor]:
        return [b.now for b in self._buffers if b.now is not None]

    def changes(self) -> Tensor:
        """Return each buffer's mark (float64, on the device), to be summed over ranks.

        A sum above the world size means that the buffer cannot be sent.
        """
        marks = [self._mark(i) for i in range(len(self._buffers))]
        self._num_compared += 1
        if self._num_compared == NUM_COMPARED:
            for buffer in self._buffers:
                buffer.values = None
        return torch.tensor(marks, dtype=torch.float64, device=self._world.device)

    def sync(self, changes: Tensor) -> int:
        """Broadcast rank 0's values of all buffers that changed on any rank; return the bytes sent.

        Raises ValueError, on all ranks, if a persistent buffer changed its shape or dtype.
        """
        summed = changes.tolist()
        for buffer, count in zip(self._buffers, summed, strict=True):
            if count > self._world.size and buffer.persistent:
                problem = f"buffer {buffer.name} got another shape or dtype while training"
                raise ValueError(f"{problem}: register it with persistent=False, or keep its shape")
        changed = [
            b for b, n in zip(self._buffers, summed, strict=True) if 0 < n <= self._world.size
        ]
        num_bytes = self._send(changed) if self._world.size > 1 else 0
        for buffer, count in zip(self._buffers, summed, strict=True):
            if count:
                self._note(buffer)
        return num_bytes

    def share(self) -> None:
        """Sum the changes and sync, for an engine whose step has no all-reduce that the changes could join.

        If no buffer is persistent and none changed in the first step (rotary frequencies), later calls do nothing.
        """
        if not self._may_change:
            return
        changes = self.changes()
        worlds.sum_over_ranks(changes)
        self._may_change = self.any_persistent or self._num_compared > 1 or bool(changes.any())
        self.sync(changes)

    # -- state --------------------------------------------------------------------------------------

    def canonical(self) -> CanonicalState:
        """Return the persistent buffers, whole, from rank 0."""
        state: CanonicalState = {}
        for name, owner, key, tensor in _registered(self._module):
            if not _is_persistent(owner, key):
                continue
            if tensor.layout is not torch.strided:
                problem = f"buffer {name} is sparse, which no state carries"
                raise ValueError(f"{problem}: register it with persistent=False")
            canonical = canonical_whole(tensor)
            if self._world.rank != 0:
                canonical = CanonicalTensor(canonical.shape, canonical.dtype, [])
            state[name] = {BUFFER: canonical}
        return state

    def require(self, state: CanonicalState) -> None:
        """Raise ValueError unless `load` can load this state; print one line if the state has no buffers at all."""
        saved = {name: entry[BUFFER] for name, entry in state.items() if BUFFER in entry}
        ours = {b.name: b for b in _find(self._module) if b.persistent}
        if ours and not saved:
            first = f"{next(iter(ours))} and {len(ours) - 1} others"
            if self._world.rank == 0:
                print(
                    f"the state has no buffers, as older ones have none: {first} stay as they are"
                )
            return
        for name in (*saved, *ours):
            if name not in ours or name not in saved:
                where = (
                    "state and not in this model" if name in saved else "model and not in the state"
                )
                raise ValueError(f"buffer {name} is in the {where}; give a state of this model")
            shape = tuple(ours[name].seen.shape)
            if shape != tuple(saved[name].shape):
                difference = (
                    f"is {list(saved[name].shape)} in the state, {list(shape)} in this model"
                )
                raise ValueError(f"buffer {name} {difference}; give a state of this model")
            require_covered(saved[name], 0, ours[name].seen.numel(), name)

    def load(self, state: CanonicalState) -> None:
        """Load the buffers of `state`, which was given to `require`."""
        for buffer in _find(self._module):
            if buffer.persistent and BUFFER in state.get(buffer.name, {}):
                canonical = state[buffer.name][BUFFER]
                flat = torch.empty(buffer.seen.numel(), dtype=canonical.dtype)
                fill_from_canonical(flat, canonical, name=buffer.name)
                _write(buffer, flat)
        for buffer in self._buffers:
            self._note(buffer)

    # -- how --------------------------------------------------------------------------------------

    def _mark(self, index: int) -> int:
        buffer = self._buffers[index]
        now = buffer.now
        if now is None or now.layout is not torch.strided:
            return 0 if now is buffer.seen else self._world.size + 1
        if (now.shape, now.dtype) != self._shapes[index]:
            return self._world.size + 1
        moved = now is not buffer.seen or (_version(now), now.data_ptr()) != (
            buffer.version,
            buffer.address,
        )
        if not moved and buffer.values is not None and not _same(now, buffer.values):
            buffer.always = True
        return int(moved or buffer.always)

    def _note(self, buffer: _Buffer) -> None:
        if (now := buffer.now) is not None:
            buffer.seen, buffer.version = now, _version(now)
            if now.layout is torch.strided:
                buffer.address = now.data_ptr()
            if buffer.values is not None:
                buffer.values = now.detach().clone()

    def _send(self, changed: Sequence[_Buffer]) -> int:
        """Broadcast the buffers as bytes, so that one broadcast takes all dtypes."""
        if not changed:
            return 0
        mine = [_bytes_of(b.now) for b in changed if b.now is not None]
        sent = torch.cat(mine)
        worlds.broadcast(sent)
        if self._world.rank != 0:
            for buffer, part in zip(changed, sent.split([len(m) for m in mine]), strict=True):
                # The clone starts at its own address, so that it can be viewed in any dtype.
                _write(buffer, part.clone().view(buffer.seen.dtype))
        return sent.nbytes


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the module's state, each under all of its names."""
    registered = _registered(module)
    return {name: tensor for name, owner, key, tensor in registered if _is_persistent(owner, key)}


def _find(module: nn.Module) -> list[_Buffer]:
    """List the module's buffers in the order of the modules."""
    return [_new(*each) for each in _registered(module)]


def _registered(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield the name of each buffer, the module that owns it, its key there, and the tensor."""
    for prefix, owner in module.named_modules():
        for key, tensor in owner.named_buffers(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{key}" if prefix else key, owner, key, tensor


def _is_persistent(owner: nn.Module, key: str) -> bool:
    return key not in owner._non_persistent_buffers_set


def _new(name: str, owner: nn.Module, key: str, tensor: Tensor) -> _Buffer:
    strided = tensor.layout is torch.strided
    return _Buffer(
        name,
        _is_persistent(owner, key),
        owner,
        key,
        seen=tensor,
        version=_version(tensor),
        address=tensor.data_ptr() if strided else 0,
        values=tensor.detach().clone() if strided else None,
    )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same(tensor: Tensor, values: Tensor) -> bool:
    return torch.equal(_bytes_of(tensor), _bytes_of(values))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


@torch.no_grad()
def _write(buffer: _Buffer, flat: Tensor) -> None:
    """Write in place, so that views and tied names see the values; replace a tensor whose elements share memory."""
    now = buffer.now
    assert now is not None
    values = flat.view(now.shape)
    overlaps = any(s == 0 and n > 1 for s, n in zip(now.stride(), now.shape, strict=True))
    if overlaps or now.is_inference():
        setattr(buffer.owner, buffer.key, values.to(now.device, now.dtype))
    else:
        now.copy_(values)
