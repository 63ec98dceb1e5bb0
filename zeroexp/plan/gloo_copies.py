"""The copies that gloo makes of what it reduces and gathers, beside which torch's engines on CPUs have their peak.

ProcessGroupGloo reduces a copy of the input of a reduce-scatter, and gathers into a copy of the output of an
all-gather. torch allocates both; they live as long as the collective. A rehearsal has them when it is issued, since
torch's engines do not tell when they wait for it.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zeroexp.plan.storages import MESSAGES, Storages

# Collective -> which of its arguments gloo copies.
COPIED = {"c10d::_reduce_scatter_base_": 1, "c10d::_allgather_base_": 0}


class GlooCopies(TorchDispatchMode):
    """Lets `storages`, the mode outside of this one, see the copies."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        index = COPIED.get(func._schema.name)
        if index is not None:
            self._storages.assign_kind(MESSAGES, [torch.empty_like(args[index])])
        return func(*args, **(kwargs or {}))
