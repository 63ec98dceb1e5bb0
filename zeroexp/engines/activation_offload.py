"""Activation offload: what a block saves for backward rests on the host from its forward until its backward.

    forward     block 0     block 1     |  backward     block 1     block 0
    saved         ──▶ host    ──▶ host  |                 ◀── host    ◀── host      weights stay where they are

torch's `save_on_cpu` copies gathered weights as well, of which ZeRO-3 then frees nothing, and one tensor as often as it
is saved. Here a parameter or a view of one is passed on to the saved-tensors hooks around the block: those of our
engine keep its place (zero/saved_views.py), and without any it is kept as it is.

A block that recomputes saves its inputs alone, and these go to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroexp.comm.bus import copy_over
from zeroexp.measure.memory import on_host
from zeroexp.zero.held import unguarded
from zeroexp.zero.saved_views import SavedTensor


def offload_blocks(module: nn.Module, blocks: Sequence[str]) -> None:
    """Let each block, named as in `BuiltModel.blocks`, save on the host; this changes `module` in place."""
    for name in blocks:
        block = module.get_submodule(name)
        block.forward = _offloaded(block, block.forward)


def _offloaded(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        # What was saved already; the tensors are kept so long, since others could get their memory.
        copied: dict[Any, tuple[Tensor, Tensor]] = {}
        try:
            with _saving_on_host(block, copied):
                return forward(*args, **kwargs)
        finally:
            copied.clear()  # torch keeps the hooks as long as what they saved

    return offloaded


def _saving_on_host(
    block: nn.Module, copied: dict[Any, tuple[Tensor, Tensor]]
) -> saved_tensors_hooks:
    """Return the context of one forward of the block, whose weights are there."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    pack_around, unpack_around = around or (lambda tensor: tensor,) * 2
    weights = {_storage_of(parameter) for parameter in block.parameters()}

    def pack(tensor: Tensor) -> tuple[torch.device | None, Any]:
        kept = pack_around(tensor)
        is_place = kept is not tensor and not isinstance(kept, SavedTensor)
        is_dense = tensor.layout is torch.strided
        if is_place or not is_dense or _storage_of(tensor) in weights:
            return None, kept
        storage, offset = _storage_of(tensor), tensor.storage_offset()
        key = storage, offset, tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        if key not in copied:
            with on_host.entered():
                copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copy_over(copy, tensor)
            copied[key] = tensor, copy
        return tensor.device, copied[key][1]

    def unpack(saved: tuple[torch.device | None, Any]) -> Tensor:
        device, kept = saved
        if device is None:
            return unpack_around(kept)
        there = torch.empty_like(kept, device=device)
        copy_over(there, kept)
        return there

    return saved_tensors_hooks(pack, unpack)


def _storage_of(tensor: Tensor) -> int:
    with unguarded():  # a weight of a part of the block may not be there yet
        return tensor.untyped_storage()._cdata
