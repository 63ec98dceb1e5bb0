"""Let one block run for many: blocks that are alike use their units alike, one block after the other.

blocks of the model   0  1  2  3  ...  30  31
blocks that run       0  1                 31     what block 1 does, blocks 2 to 30 do
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

from torch import nn

from zeroexp.plan.block_kinds import kinds_of

What = TypeVar("What")


def leave_out_alike(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Leave all but the first of the alike blocks out of `module`, and return their names; none if all remain.

    They are those between the first and the last block, since either end may differ from them.
    """
    holder = blocks[0].rpartition(".")[0] if blocks else ""
    listed = module.get_submodule(holder)
    kinds = set(kinds_of(module, blocks)[1:-1])
    if len(kinds) != 1 or not isinstance(listed, nn.ModuleList):
        return []
    if [*listed] != [module.get_submodule(name) for name in blocks]:
        return []
    outer, _, key = holder.rpartition(".")
    setattr(module.get_submodule(outer), key, nn.ModuleList([listed[0], listed[1], listed[-1]]))
    return list(blocks[1:-1])


def repeated(
    uses: Sequence[tuple[What, str]], alike: Sequence[str], *, backward: bool = False
) -> list[tuple[What, str]]:
    """Return uses of named modules, with those inside of the first of `alike` once for each of them."""

    def is_inside(use: tuple[What, str]) -> bool:
        return bool(alike) and f"{use[1]}.".startswith(f"{alike[0]}.")

    found: list[tuple[What, str]] = []
    for inside, group in groupby(uses, is_inside):
        ran = list(group)
        if not inside:
            found += ran
            continue
        for block in reversed(alike) if backward else alike:
            found += [(what, block + name.removeprefix(alike[0])) for what, name in ran]
    return found
