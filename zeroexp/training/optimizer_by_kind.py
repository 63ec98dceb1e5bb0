"""One optimizer for each kind of group in `optimizers_of` (config/optimizer.py), in one object.

Groups and state are shared: who sets a learning rate, saves or loads sees one optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroexp.config.keys import OptimizerConfig
from zeroexp.config.optimizer import make_one
from zeroexp.interface.whole_matrices import WholeMatrices


class OptimizerByKind(Optimizer):
    """Steps each group with the optimizer of its kind."""

    def __init__(self, groups: Iterable[dict[str, Any]], by_kind: Mapping[str, OptimizerConfig]):
        super().__init__(groups, {})
        of_kinds: dict[str, list[dict[str, Any]]] = {}
        for group in self.param_groups:
            of_kinds.setdefault(group.get("kind", ""), []).append(group)
        self._parts = {kind: make_one(own, by_kind[kind]) for kind, own in of_kinds.items()}
        self._whole = {kind: own for kind, own in self._parts.items() if hasattr(own, "matrices")}
        for part in self._parts.values():
            part.state = self.state

    @property
    def matrices(self) -> WholeMatrices:
        """Those of the optimizers that ask for some; it exists only where one does."""
        if not self._whole:
            raise AttributeError("no kind is stepped as whole matrices")
        return next(iter(self._whole.values())).matrices  # pyright: ignore[reportAttributeAccessIssue]

    @matrices.setter
    def matrices(self, matrices: WholeMatrices) -> None:
        for kind, part in self._whole.items():
            part.matrices = matrices.of_kind(kind)  # pyright: ignore[reportAttributeAccessIssue]

    def part_of(self, parameter: Tensor) -> Optimizer:
        """Return the optimizer that steps a parameter."""
        return next(
            part
            for part in self._parts.values()
            if any(parameter is p for group in part.param_groups for p in group["params"])
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for part in self._parts.values():
            part.step()
