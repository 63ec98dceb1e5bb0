"""What a folder of another trainer holds, before any value of it is read."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals


class Place(NamedTuple):
    """One tensor of a checkpoint: the parameter or buffer, and "weight" or the name of a moment."""

    name: str
    key: str


@dataclass(frozen=True)
class ForeignCheckpoint:
    folder: Path
    tensors: dict[Place, Tensor]  # on meta: shapes and dtypes
    # Copies values into a tensor of this shape and dtype, and holds at most one tensor of the files meanwhile.
    read: Callable[[Place, Tensor], None]
    step: int | None = None  # steps done; None: the moments named "step" tell
    left_out: list[str] = field(default_factory=list[str])  # what is neither weight nor moment
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the trainer, if held
    in_pairs: bool = False  # whether rows are as torchtitan's are, see TURNED in matching.py


def folder_of_step(folder: Path, latest: str, named: str = "{}") -> Path:
    """Return the folder itself, or that of the step which its file `latest` tells.

    named: what the folder of a step is called.
    """
    file = folder / latest
    if not file.is_file():
        return folder
    return folder / named.format(file.read_text(encoding="utf-8").strip())


class Opaque:
    """An object of the trainer's in a file, with the attributes that it was saved with."""

    def __new__(cls, *_: object) -> Opaque:
        return object.__new__(cls)


def load_with_stand_ins(source: Path | io.BytesIO, package: str = "", **how: Any) -> Any:
    """Unpickle what torch saved; an Opaque stands for each class of this package (all: ""), which is not imported."""
    theirs = [n for n in get_unsafe_globals_in_checkpoint(source) if n.startswith(package)]
    if isinstance(source, io.BytesIO):
        source.seek(0)
    # One class for each name: torch looks up which name an object's class was allowed under.
    stand_ins: list[Any] = [(type("Opaque", (Opaque,), {}), name) for name in theirs]
    with safe_globals(stand_ins):
        return torch.load(source, weights_only=True, **how)
