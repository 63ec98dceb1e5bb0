"""Muon for the matrices of the model's blocks, AdamW for all other parameters: two optimizers of torch in one.

Muon orthogonalizes the momentum of a whole matrix (Jordan et al. 2024), so that a rank needs the whole of each matrix
that it updates: the layout `parameter` gives each one to one owner. Nothing more is sent than with AdamW. Which
parameters are matrices of blocks is decided by `parameter_groups` in config/optimizer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Muon, Optimizer

from zeroexp.config.keys import ConfigError, OptimizerConfig
from zeroexp.config.optimizer import OPTIMIZERS
from zeroexp.cut.chunk import MATRIX

ADJUSTMENTS = ("match_rms_adamw", "original")


class MuonAndAdamW(Optimizer):
    """Muon for groups of the kind `matrix`, AdamW for the others; both share groups and state with this optimizer."""

    moments_dtype = None  # see `empty_moment`

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        of_matrices: Callable[[list[dict[str, Any]]], Muon],
        of_others: Callable[[list[dict[str, Any]]], Optimizer],
    ):
        super().__init__(groups, {})
        is_matrix = [group.get("kind") == MATRIX for group in self.param_groups]
        matrices = [g for g, matrix in zip(self.param_groups, is_matrix, strict=True) if matrix]
        others = [g for g, matrix in zip(self.param_groups, is_matrix, strict=True) if not matrix]
        self._parts: list[Optimizer] = [of_matrices(matrices)] if matrices else []
        self._parts += [of_others(others)] if others else []
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for part in self._parts:
            part.step()


def make_muon(groups: Iterable[Any], config: OptimizerConfig) -> Optimizer:
    """Make both over the groups of `parameter_groups`. Raises ConfigError for settings that have no meaning."""
    settings = {**OPTIMIZERS["muon"].settings, **config.settings}
    steps, adjust = settings["ns_steps"], settings["adjust_lr"]
    if type(steps) is not int or not 1 <= steps < 100:
        raise ConfigError(f"optimizer.settings.ns_steps={steps}: no number of steps; use 1 to 99")
    if type(settings["nesterov"]) is not bool:
        raise ConfigError(f"optimizer.settings.nesterov={settings['nesterov']}: use true or false")
    if adjust not in ADJUSTMENTS:
        remedy = f"use {' or '.join(ADJUSTMENTS)}"
        raise ConfigError(f"optimizer.settings.adjust_lr={adjust}: unknown word; {remedy}")

    def of_matrices(matrices: list[dict[str, Any]]) -> Muon:
        return Muon(
            matrices,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            nesterov=bool(settings["nesterov"]),
            ns_steps=steps,
            adjust_lr_fn=adjust,
        )

    def of_others(others: list[dict[str, Any]]) -> Optimizer:
        return OPTIMIZERS["adamw"].make(others, config)

    return MuonAndAdamW(groups, of_matrices=of_matrices, of_others=of_others)
