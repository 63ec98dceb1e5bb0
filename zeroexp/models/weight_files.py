"""Read the name, shape and dtype of every tensor in a folder of safetensors, without reading its values."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

NAME = "model.safetensors"


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
            with safe_open(file, "pt") as opened:
                slices = {key: opened.get_slice(key) for key in opened.offset_keys()}
                headers |= {
                    key: Header(tuple(each.get_shape()), each.get_dtype(), file, key)
                    for key, each in slices.items()
                }
        except (OSError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UnreadableWeights(f"{file.name}: {reason}") from error
    return headers


def read_tensor(header: Header) -> Tensor:
    with safe_open(header.file, "pt") as opened:
        return opened.get_tensor(header.key)


def read_range(header: Header, start: int, stop: int) -> Tensor:
    """Return the elements [start, stop) of a flattened tensor; no more rows of the file are read than hold them."""
    if not header.shape:
        return read_tensor(header).reshape(-1)[start:stop]
    row = math.prod(header.shape[1:])
    first = start // max(row, 1)
    last = -(-stop // max(row, 1))
    with safe_open(header.file, "pt") as opened:
        rows = opened.get_slice(header.key)[first:last]
    return rows.reshape(-1)[start - first * row : stop - first * row]


def _files(folder: Path) -> list[Path]:
    index = folder / f"{NAME}.index.json"
    if (folder / NAME).is_file():
        return [folder / NAME]
    if not index.is_file():
        raise UnreadableWeights(f"no {NAME}, and no index of several")
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableWeights(f"{index.name}: no index of files") from error
