"""Read a model's weights from files, one parameter at a time, and of it the ranges that this rank holds.

    one tensor of the file, as it stands         rows of it are read
    in parts, or together with others            put together whole, then cut (huggingface_tensor_names.py)
    not in the file (a new head)                 drawn

Buffers that belong to the model's state (the bias of a router, running statistics) are read whole: every rank has all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from zeroexp.interface.module_buffers import persistent_buffers
from zeroexp.interface.values import Read
from zeroexp.models.deferred import Drawn, ranges_of
from zeroexp.models.huggingface_tensor_names import Together, elements_of_parts, published_together
from zeroexp.models.read_weight_files import Header, read_range, read_tensor


class Stored:
    """The values in files, given as headers by published name; what is missing there comes from `drawn`, if given."""

    def __init__(
        self, module: nn.Module, headers: Mapping[str, Header], drawn: Drawn | None
    ) -> None:
        self._module, self._headers = module, headers
        groups = published_together(module)
        self._there = [group for group in groups if headers.keys() >= set(group.parts)]
        missing = {n for group in groups if group not in self._there for n in group.shapes}
        self._drawn = drawn.only(missing) if drawn is not None else None

    def fill_buffers(self) -> None:
        """Give the module's buffers their values; those have memory already, whatever its parameters have."""
        buffers = persistent_buffers(self._module)
        for group in self._there:
            if buffers.keys() & group.shapes.keys():
                for name, values in self._read(group).items():
                    buffers[name].copy_(values)

    def __iter__(self) -> Iterator[tuple[str, Read]]:
        buffers = persistent_buffers(self._module).keys()
        for group in self._there:
            if buffers & group.shapes.keys():
                continue
            if (header := self._as_it_stands(group)) is not None:
                (name,) = group.shapes
                yield name, partial(read_range, header)
                continue
            values = self._read(group)
            for name in group.shapes:
                held = [values.pop(name)]
                yield name, ranges_of(held)
                held.clear()
        yield from self._drawn or ()

    def fingerprint(self) -> int:
        """Return a sum over names, shapes, dtypes and the first numbers of each tensor."""
        fingerprint = self._drawn.fingerprint() if self._drawn is not None else 0
        for part in (part for group in self._there for part in group.parts):
            header = self._headers[part]
            first = read_range(header, 0, 1).float().tolist()
            fingerprint = zlib.crc32(
                repr((part, header.shape, header.dtype, first)).encode(), fingerprint
            )
        return fingerprint

    def _as_it_stands(self, group: Together) -> Header | None:
        """Return the one tensor of the file that is the group's one tensor; None for any other group."""
        headers, shapes = [self._headers[part] for part in group.parts], [*group.shapes.values()]
        alike = [tuple(shape) for shape in shapes] == [header.shape for header in headers]
        return headers[0] if alike and len(headers) == 1 else None

    def _read(self, group: Together) -> dict[str, Tensor]:
        """Return the whole tensors: in the file's dtype one that stands there as it is, else in float32."""
        if (header := self._as_it_stands(group)) is not None:
            return group.cut(read_tensor(header).reshape(-1))
        flat = torch.empty(group.numel, dtype=torch.float32)
        for part, places in elements_of_parts(self._module, group).items():
            values = read_tensor(self._headers[part]).float()
            flat[places.reshape(-1).long()] = values.reshape(-1)
        return group.cut(flat)
