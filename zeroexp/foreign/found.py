"""What a folder of another trainer holds, before any value of it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor


class Place(NamedTuple):
    """One tensor of a checkpoint: the parameter or buffer, and "weight" or the name of a moment."""

    name: str
    key: str


@dataclass(frozen=True)
class Found:
    folder: Path
    tensors: dict[Place, Tensor]  # on meta: shapes and dtypes
    # Copies values into a tensor of this shape and dtype, and holds at most one tensor of the files meanwhile.
    read: Callable[[Place, Tensor], None]
    step: int | None = None  # steps done; None: the moments named "step" tell
    left_out: list[str] = field(default_factory=list[str])  # what is neither weight nor moment
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the trainer, if held
    in_pairs: bool = False  # whether rows are as torchtitan's are, see TURNED in matching.py
