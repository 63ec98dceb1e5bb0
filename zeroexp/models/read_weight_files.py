"""Read a folder of weights: name, shape and dtype of every tensor, then the values of one, or a range of them."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# This is transformers' order; each name may also be that of an index.
NAMES = ("model.safetensors", "pytorch_model.bin")
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


class UnreadableWeights(ValueError):
    """The error of weights that cannot be read: one line that names the file."""


@dataclass(frozen=True)
class Header:
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, I8, ...
    file: Path
    key: str  # the tensor's name in the file


def read_headers(folder: Path) -> dict[str, Header]:
    """Return the header of every tensor that transformers would read from `folder`. Raises UnreadableWeights."""
    headers: dict[str, Header] = {}
    for file in _files(folder):
        try:
            headers.update(_in(file))
        except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UnreadableWeights(f"{file.name}: {reason}") from error
    return headers


def read_tensor(header: Header) -> Tensor:
    if header.file.suffix == ".bin":
        return torch.load(header.file, map_location="cpu", weights_only=True, mmap=True)[header.key]
    with safe_open(header.file, "pt") as opened:
        return opened.get_tensor(header.key)


def read_range(header: Header, start: int, stop: int) -> Tensor:
    """Return the elements [start, stop) of a flattened tensor; no more rows of the file are read than hold them."""
    if header.file.suffix == ".bin" or not header.shape:
        return read_tensor(header).reshape(-1)[start:stop]
    row = math.prod(header.shape[1:])
    first = start // max(row, 1)
    last = -(-stop // max(row, 1))
    with safe_open(header.file, "pt") as opened:
        rows = opened.get_slice(header.key)[first:last]
    return rows.reshape(-1)[start - first * row : stop - first * row]


def _files(folder: Path) -> list[Path]:
    for name in NAMES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            try:
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                return [folder / name for name in sorted(set(names))]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UnreadableWeights(f"{index.name}: no index of files") from error
    raise UnreadableWeights(f"no {' or '.join(NAMES)}, and no index of several")


def _in(file: Path) -> Iterator[tuple[str, Header]]:
    if file.suffix == ".bin":
        content: object = torch.load(file, map_location="meta", weights_only=True, mmap=True)
        for key, tensor in _tensors_in(content, file):
            dtype = DTYPES.get(tensor.dtype, str(tensor.dtype))
            yield key, Header(tuple(tensor.shape), dtype, file, key)
        return
    with safe_open(file, "pt") as opened:
        for key in opened.offset_keys():
            tensor = opened.get_slice(key)
            yield key, Header(tuple(tensor.get_shape()), tensor.get_dtype(), file, key)


def _tensors_in(content: object, file: Path) -> Iterator[tuple[str, Tensor]]:
    named = content if isinstance(content, dict) else {"the content": content}
    for key, tensor in named.items():
        if not isinstance(tensor, Tensor):
            problem = f"{key} is a {type(tensor).__name__} and no tensor"
            raise UnreadableWeights(f"{file.name}: {problem}; save model.state_dict() alone")
        yield key, tensor
