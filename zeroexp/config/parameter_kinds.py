"""Which row of `optimizer.kinds` a parameter belongs to: that of its name, or of its kind.

    embeddings   weights of nn.Embedding, also where the head is tied to them
    vectors      what has fewer than two dimensions: norms, biases, gains
    routers      matrices of a block in a module `router` or `gate`
    experts      matrices of a block inside of a module `experts`, of two dimensions or fused in three
    matrices     all other matrices of blocks
    heads        all other matrices: those outside of blocks

A row whose word has a dot or one of `*?[` is a pattern of names, as in `model.freeze`. The first pattern that matches
counts, and patterns count before kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from zeroexp.config.keys import ConfigError

if TYPE_CHECKING:
    from torch import nn

KINDS = ("matrices", "vectors", "embeddings", "heads", "experts", "routers")
ROUTERS = {"router", "gate"}


def is_pattern(row: str) -> bool:
    return re.search(r"[.*?[]", row) is not None


def kinds_of_parameters(module: nn.Module, blocks: Sequence[str]) -> dict[nn.Parameter, str]:
    """Return the kind of each trainable parameter, in the module's order."""
    from torch import nn

    kinds: dict[nn.Parameter, str] = {}
    for name, owner in module.named_modules():
        path = name.split(".")
        in_block = any(name == block or name.startswith(f"{block}.") for block in blocks)
        for parameter in owner.parameters(recurse=False):
            kind = _kind_of(path, parameter.ndim, in_block=in_block)
            kinds.setdefault(parameter, kind)
            if isinstance(owner, nn.Embedding):
                kinds[parameter] = "embeddings"
    return {p: kinds[p] for p in module.parameters() if p.requires_grad}


def _kind_of(path: Sequence[str], ndim: int, *, in_block: bool) -> str:
    if ndim < 2:
        return "vectors"
    if not in_block:
        return "heads"
    if path[-1] in ROUTERS:
        return "routers"
    return "experts" if "experts" in path else "matrices"


def rows_of_parameters(
    module: nn.Module, blocks: Sequence[str], rows: Iterable[str]
) -> dict[nn.Parameter, str]:
    """Return the row of each trainable parameter, or "" where no row is for it.

    Raises ConfigError for a row that no trainable parameter belongs to.
    """
    rows = list(rows)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)  # a tied parameter has two
    patterns = [row for row in rows if is_pattern(row)]
    row_of: dict[nn.Parameter, str] = {}
    for parameter, kind in kinds_of_parameters(module, blocks).items():
        matched = (p for p in patterns if any(fnmatchcase(n, p) for n in names[parameter]))
        row_of[parameter] = next(matched, kind if kind in rows else "")
    for row in rows:
        if row not in row_of.values():
            problem = "no trainable parameter of the model is left for this row"
            raise ConfigError(f"optimizer.kinds.{row}: {problem}; leave it out, or move it up")
    return row_of
