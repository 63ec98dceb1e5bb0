"""Keep a module's buffers (BatchNorm's running statistics, counters) equal on all ranks, and save and load them.

Each rank computes its own buffers in forward. DistributedDataParallel sends rank 0's values with the first forward
after a step; this module sends them at the end of the step, and only those that changed on any rank: a sum over ranks
of one number a buffer tells which, and one broadcast, or none, carries them.

On a GPU the host would wait for that sum, so it is read with the next step's where nothing had changed in the step
before, as in most models: the first change then takes a step more to arrive. It is read before a state is given,
which so holds no buffer of another shape.

A buffer has changed if its tensor has another version, another address, or was replaced (`self.n = self.n + 1`). Writes
that bypass the version (`self.mean.data.mul_()`) are found by comparing values in the first steps, and such a buffer is
sent in every later step. A buffer that is registered after the engine was built, or that changes shape, stays local to
each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from zeroexp.interface.canonical import BUFFER, canonical_of_one_rank
from zeroexp.interface.reshard import fill_from_canonical
from zeroexp.interface.strategy import CanonicalState
from zeroexp.process import world as worlds
from zeroexp.process.world import World

NUM_COMPARED = 2  # number of first steps in which values are compared as well


class _Buffer:
    """One name of a buffer; a tensor with several names appears once under each."""

    def __init__(self, name: str, owner: nn.Module, key: str, tensor: Tensor) -> None:
        self.name, self.owner, self.key = name, owner, key
        self.persistent = key not in owner._non_persistent_buffers_set
        self.first = tensor  # those after it that are sent have its shape and dtype
        self.values = tensor if tensor.layout is torch.strided else None  # in the first steps only
        self.always = False  # was written without a new version

    @property
    def now(self) -> Tensor | None:
        return getattr(self.owner, self.key, None)

    def note(self) -> None:
        """Remember what the buffer is at a sync; the reference keeps a tensor's identity from being reused."""
        if (now := self.now) is not None:
            self._seen, self._place = now, _place_of(now)
            self.values = None if self.values is None else now.detach().clone()

    def mark(self, never: int) -> int:
        """Return whether the buffer has changed since the last sync, and `never` where it can not be sent."""
        now = self.now
        if now is None or now.layout is not torch.strided:
            return 0 if now is self._seen else never
        if (now.shape, now.dtype) != (self.first.shape, self.first.dtype):
            return never
        moved = now is not self._seen or _place_of(now) != self._place
        if not moved and self.values is not None:
            self.always |= not torch.equal(bytes_of(now), bytes_of(self.values))
        return int(moved or self.always)

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Write in place, so that views and tied names see the values; replace a tensor whose elements share memory."""
        now = self.now
        assert now is not None
        values = flat.view(now.shape)
        if shares_elements(now) or now.is_inference():
            setattr(self.owner, self.key, values.to(now.device, now.dtype))
        else:
            now.copy_(values)


class Buffers:
    """The buffers of a module, in the same order on every rank; all ranks call `share` and `load` together."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self._module, self._world = module, world
        self._num_steps = 0
        self._reads_late = world.device.type != "cpu"
        # Of the last step, where nothing had changed before.
        self._unread: Callable[[], list[float]] | None = None
        # A fake world has nobody to send to, and its buffers may have neither values nor addresses.
        self._buffers = [] if world.is_fake or world.size == 1 else list(_buffers_of(module))
        self._may_change = bool(self._buffers)
        for buffer in self._buffers:
            buffer.note()

    def share(self) -> int:
        """Make those that changed on any rank what they are on rank 0; return the bytes sent.

        If no buffer is persistent and none changed in the first step (rotary frequencies), later calls do nothing.
        Raises ValueError, on all ranks, if a persistent buffer changed its shape or dtype.
        """
        if not self._may_change:
            return 0
        never = self._never
        marks = [buffer.mark(never) for buffer in self._buffers]
        summed = torch.zeros(len(marks), dtype=torch.float64, device=self._world.device)
        if any(marks):  # else the host need not wait for a copy
            summed.copy_(torch.tensor(marks))
        worlds.sum_over_ranks(summed)
        read, before = self._world.read_later(summed), self._unread
        self._unread = read
        if before is not None and not any(before()):
            return 0
        self.require_shapes()
        counts = list(zip(self._buffers, read(), strict=True))
        self._num_steps += 1
        keeps_state = any(buffer.persistent for buffer in self._buffers)
        self._may_change = keeps_state or self._num_steps > 1 or any(count for _, count in counts)
        if self._num_steps == NUM_COMPARED:
            for buffer in self._buffers:
                buffer.values = None
        is_idle = self._num_steps >= NUM_COMPARED and not any(count for _, count in counts)
        self._unread = read if self._reads_late and is_idle else None
        num_bytes = self._send([buffer for buffer, count in counts if 0 < count < never])
        for buffer, count in counts:
            if count:
                buffer.note()
        return num_bytes

    @property
    def _never(self) -> int:
        """What a rank adds to the sum of a buffer that can not be sent: more than all ranks where it changed."""
        return self._world.size + 1

    def require_shapes(self) -> None:
        """Raise ValueError, as all ranks do, if a persistent buffer had another shape or dtype in the last `share`."""
        counts = self._unread() if self._unread is not None else []
        for buffer, count in zip(self._buffers, counts, strict=False):
            if count >= self._never and buffer.persistent:
                problem = f"buffer {buffer.name} got another shape or dtype while training"
                raise ValueError(f"{problem}: register it with persistent=False, or keep its shape")

    def _send(self, changed: Sequence[_Buffer]) -> int:
        """Broadcast the buffers as bytes, so that one broadcast takes all dtypes."""
        if not changed:
            return 0
        mine = [bytes_of(b.now) for b in changed if b.now is not None]
        sent = torch.cat(mine)
        worlds.broadcast(sent)
        if self._world.rank != 0:
            for buffer, part in zip(changed, sent.split([len(m) for m in mine]), strict=True):
                # The clone starts at its own address, so that it can be viewed in any dtype.
                buffer.write(part.clone().view(buffer.first.dtype))
        return sent.nbytes

    # -- state --------------------------------------------------------------------------------------

    def persistent(self) -> dict[str, Tensor]:
        return persistent_buffers(self._module)

    def canonical(self) -> CanonicalState:
        """Return the persistent buffers, whole, from rank 0. Raises as `require_shapes` does."""
        self.require_shapes()
        state: CanonicalState = {}
        for name, tensor in self.persistent().items():
            if tensor.layout is not torch.strided:
                problem = f"buffer {name} is sparse, which no state carries"
                raise ValueError(f"{problem}: register it with persistent=False")
            state[name] = {BUFFER: canonical_of_one_rank(tensor)}
            if self._world.rank != 0:
                state[name][BUFFER].pieces.clear()
        return state

    def load(self, state: CanonicalState) -> None:
        """Load the persistent buffers, all of which the state has."""
        for buffer in (each for each in _buffers_of(self._module) if each.persistent):
            canonical = state[buffer.name][BUFFER]
            flat = torch.empty(buffer.first.numel(), dtype=canonical.dtype, device="cpu")
            fill_from_canonical(flat, canonical, name=buffer.name)
            buffer.write(flat)
        for buffer in self._buffers:
            buffer.note()


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the module's state, each under all of its names."""
    return {each.name: each.first for each in _buffers_of(module) if each.persistent}


def _buffers_of(module: nn.Module) -> Iterator[_Buffer]:
    for prefix, owner in module.named_modules():
        for key, tensor in owner.named_buffers(recurse=False, remove_duplicate=False):
            yield _Buffer(f"{prefix}.{key}" if prefix else key, owner, key, tensor)


def _place_of(tensor: Tensor) -> tuple[int, int]:
    """Return the version of a tensor and its address."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr() if tensor.layout is torch.strided else 0


def shares_elements(tensor: Tensor) -> bool:
    """Tell whether elements of a tensor lie in the same memory, as those of an expanded one."""
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
