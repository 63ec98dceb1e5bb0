"""The copies that gloo makes of what it reduces and gathers, beside which torch's engines on CPUs have their peak.

ProcessGroupGloo reduces a copy of the input of a reduce-scatter, and gathers into a copy of the output of an
all-gather. torch allocates both; they live as long as the collective. A rehearsal has them when it is issued, since
torch's engines do not tell when they wait for it.

[Note: late] A thread of gloo first tells that a collective is done, and then lets go of it: of the copy that it
reduced, of the output that it gathered. Where other processes have the cores, the rank goes on meanwhile, as far as
through a microbatch. gloo has two threads: one may still hold the largest collective so far, and the other the last.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroexp.plan.local_operations import LocalOperations
from zeroexp.plan.storages import MESSAGES, Storages

REDUCE, GATHER = "c10d::_reduce_scatter_base_", "c10d::_allgather_base_"
COPIED = {REDUCE: 1, GATHER: 0}  # collective -> which of its arguments gloo copies


class GlooCopies(LocalOperations):
    """Lets `storages`, the mode outside of this one, see the copies; `late`: as late as gloo may let go of them."""

    def __init__(self, storages: Storages, *, late: bool = False) -> None:
        super().__init__()
        self._storages = storages
        self._late = late
        self._held: list[Tensor] = []  # by each of gloo's threads, see [Note: late]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if name in COPIED:
            copy = torch.empty_like(args[COPIED[name]])
            self._storages.assign_kind(MESSAGES, [copy])
            if self._late:
                largest = sorted(self._held, key=lambda tensor: tensor.nbytes)[-1:]
                self._held = [*largest, copy if name == REDUCE else args[0]]
        return func(*args, **kwargs)
