"""Read a model's weights from files, one parameter at a time, and of it the ranges that this rank holds.

Buffers that belong to the model's state (the bias of a router, running statistics) are read whole: every rank has all.

    model.layers.0.mlp.up_proj.weight     one tensor of the file, as it stands        rows of it are read
    model.layers.0.mlp.experts.down_proj  made of several tensors of the file         put together whole, then cut
    score.weight                          not in the file (a new head)                drawn

[Note: what is where] transformers publishes some parameters under other names and in parts: Mixtral's fused experts are
one matrix for each expert there. Its own conversion says how. A parameter that holds the number of each of its elements
is published, and the parts then tell where each of their elements belongs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from zeroexp.interface.buffers import persistent_buffers
from zeroexp.interface.values import Read
from zeroexp.models.deferred import CannotDefer, Drawn, ranges_of
from zeroexp.models.weight_files import Header, read_range, read_tensor


class Stored:
    """The values in files, given as headers by published name; what is missing there comes from `drawn`."""

    def __init__(self, module: nn.Module, headers: Mapping[str, Header], drawn: Drawn) -> None:
        self._module = module
        self._headers = headers
        self._buffers = persistent_buffers(module)
        ours = {**dict(module.named_parameters()), **self._buffers}
        self._shapes = {name: tensor.shape for name, tensor in ours.items()}
        self._parts = {name: self._parts_of(name, shape) for name, shape in self._shapes.items()}
        missing = {name for name, parts in self._parts.items() if not set(parts) <= set(headers)}
        self._drawn = drawn.only(missing)
        for name in missing:
            del self._parts[name]

    def fill_buffers(self) -> None:
        """Give the module's buffers their values; those have memory already, whatever its parameters have."""
        for name, buffer in self._buffers.items():
            buffer.copy_(self._put_together(name))

    def __iter__(self) -> Iterator[tuple[str, Read]]:
        for name, parts in self._parts.items():
            header = self._headers[parts[0]]
            if name in self._buffers:
                continue
            if len(parts) == 1 and header.shape == tuple(self._shapes[name]):
                yield name, partial(read_range, header)
            else:
                held = [self._put_together(name)]
                yield name, ranges_of(held)
                held.clear()
        yield from self._drawn

    def fingerprint(self) -> int:
        """Return a sum over names, shapes, dtypes and the first numbers of each tensor."""
        fingerprint = self._drawn.fingerprint()
        for parts in self._parts.values():
            for part in parts:
                header = self._headers[part]
                first = read_range(header, 0, 1).float().tolist()
                fingerprint = zlib.crc32(
                    repr((part, header.shape, header.dtype, first)).encode(), fingerprint
                )
        return fingerprint

    # -- how --------------------------------------------------------------------------------------

    def _parts_of(self, name: str, shape: torch.Size) -> list[str]:
        return list(self._under_published_names(name, torch.empty(shape, device="meta")))

    def _under_published_names(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        try:
            return revert_weight_conversion(cast(Any, self._module), {name: tensor})
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise CannotDefer(f"{name} is published with other parameters ({reason})") from error

    def _put_together(self, name: str) -> Tensor:
        """Return the whole tensor, in float32, see [Note: what is where]; a buffer that is not cut in its own dtype."""
        shape, parts = self._shapes[name], self._parts[name]
        if len(parts) == 1 and self._headers[parts[0]].shape == tuple(shape):
            return read_tensor(self._headers[parts[0]])
        small = shape.numel() <= torch.iinfo(torch.int32).max
        numbers = torch.arange(shape.numel(), dtype=torch.int32 if small else torch.int64)
        whole = torch.empty(shape.numel(), dtype=torch.float32)
        for part, places in self._under_published_names(name, numbers.view(shape)).items():
            whole[places.reshape(-1).long()] = read_tensor(self._headers[part]).float().reshape(-1)
        return whole.view(shape)
