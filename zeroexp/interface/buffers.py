"""Keep a module's buffers (BatchNorm's running statistics, counters) equal on all ranks, and save and load them.

Each rank computes its own buffers in forward. DistributedDataParallel sends rank 0's values with the first forward
after a step; this module sends them at the end of the step, all in one broadcast.

Buffers that belong to no state and did not change in the first step (rotary frequencies) are not sent after it. A
buffer that is registered after the engine was built, or that changes shape, stays local to each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zeroexp.interface.canonical import BUFFER, canonical_whole, fill_from_canonical
from zeroexp.interface.strategy import CanonicalState
from zeroexp.process import world as worlds
from zeroexp.process.world import World


class _Buffer:
    """One name of a buffer; a tensor with several names appears once under each."""

    def __init__(self, name: str, owner: nn.Module, key: str, tensor: Tensor) -> None:
        self.name, self.owner, self.key = name, owner, key
        self.persistent = key not in owner._non_persistent_buffers_set
        self.first = tensor  # those after it that are sent have its shape and dtype

    @property
    def now(self) -> Tensor | None:
        return getattr(self.owner, self.key, None)

    @property
    def keeps_shape(self) -> bool:
        now, first = self.now, self.first
        return now is not None and (now.layout, now.shape, now.dtype) == (
            first.layout,
            first.shape,
            first.dtype,
        )

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Write in place, so that views and tied names see the values; replace a tensor whose elements share memory."""
        now = self.now
        assert now is not None
        values = flat.view(now.shape)
        overlaps = any(s == 0 and n > 1 for s, n in zip(now.stride(), now.shape, strict=True))
        if overlaps or now.is_inference():
            setattr(self.owner, self.key, values.to(now.device, now.dtype))
        else:
            now.copy_(values)


class Buffers:
    """The buffers of a module, in the same order on every rank; all ranks call `share` and `load` together."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self._module, self.world = module, world
        # A fake world has nobody to send to, and its buffers may have neither values nor addresses.
        there = () if world.is_fake or world.size == 1 else _buffers_of(module)
        self._buffers = [each for each in there if each.first.layout is torch.strided]
        self._may_change = bool(self._buffers)
        self._at_first = [_bytes_of(each.first).clone() for each in self._buffers]  # for one step

    def share(self) -> int:
        """Make them what they are on rank 0; return the bytes sent.

        If no buffer is persistent and none changed in the first step (rotary frequencies), later calls do nothing.
        Raises ValueError, on all ranks, if a persistent buffer changed its shape or dtype.
        """
        if not self._may_change:
            return 0
        marks = [float(not each.keeps_shape) for each in self._buffers]
        summed = torch.tensor([*marks, float(self._changed())], device=self.world.device)
        worlds.sum_over_ranks(summed)
        *counts, changed = summed.tolist()
        if self._at_first:
            self._may_change = bool(changed) or any(each.persistent for each in self._buffers)
            self._at_first.clear()
        for buffer, count in zip(self._buffers, counts, strict=True):
            if count and buffer.persistent:
                problem = f"buffer {buffer.name} got another shape or dtype while training"
                raise ValueError(f"{problem}: register it with persistent=False, or keep its shape")
        alike = [each for each, count in zip(self._buffers, counts, strict=True) if not count]
        return self._send(alike) if alike and self._may_change else 0

    def _changed(self) -> bool:
        """Tell whether a buffer is not what it was before the first step, which is asked in that step alone."""
        for each, before in zip(self._buffers, self._at_first, strict=False):
            now = each.now if each.keeps_shape else None
            if now is None or not torch.equal(_bytes_of(now), before.to(now.device)):
                return True
        return False

    def _send(self, buffers: Sequence[_Buffer]) -> int:
        """Broadcast the buffers as bytes, so that one broadcast takes all dtypes."""
        mine = [_bytes_of(each.now) for each in buffers if each.now is not None]
        sent = torch.cat(mine)
        worlds.broadcast(sent)
        if self.world.rank != 0:
            for buffer, part in zip(buffers, sent.split([len(m) for m in mine]), strict=True):
                # The clone starts at its own address, so that it can be viewed in any dtype.
                buffer.write(part.clone().view(buffer.first.dtype))
        return sent.nbytes

    # -- state --------------------------------------------------------------------------------------

    def persistent(self) -> dict[str, Tensor]:
        return persistent_buffers(self._module)

    def canonical(self) -> CanonicalState:
        """Return the persistent buffers, whole, from rank 0."""
        state: CanonicalState = {}
        for name, tensor in self.persistent().items():
            if tensor.layout is not torch.strided:
                problem = f"buffer {name} is sparse, which no state carries"
                raise ValueError(f"{problem}: register it with persistent=False")
            state[name] = {BUFFER: canonical_whole(tensor)}
            if self.world.rank != 0:
                state[name][BUFFER].pieces.clear()
        return state

    def load(self, state: CanonicalState) -> None:
        """Load the buffers of a state that has all of them, or none, as older ones: then they stay as they are."""
        for buffer in _buffers_of(self._module):
            canonical = state.get(buffer.name, {}).get(BUFFER)
            if buffer.persistent and canonical is not None:
                flat = torch.empty(buffer.first.numel(), dtype=canonical.dtype)
                fill_from_canonical(flat, canonical, name=buffer.name)
                buffer.write(flat)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the module's state, each under all of its names."""
    return {each.name: each.first for each in _buffers_of(module) if each.persistent}


def _buffers_of(module: nn.Module) -> Iterator[_Buffer]:
    for prefix, owner in module.named_modules():
        for key, tensor in owner.named_buffers(recurse=False, remove_duplicate=False):
            yield _Buffer(f"{prefix}.{key}" if prefix else key, owner, key, tensor)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
