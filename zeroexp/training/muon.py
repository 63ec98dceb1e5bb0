"""Muon, for the matrices of the model's blocks.

Muon orthogonalizes the momentum of a whole matrix (Jordan et al. 2024), and all else of its step is of each element by
itself. So a rank that holds a piece keeps the momentum of that piece, and the engine brings the pieces together for the
orthogonalization alone (interface/whole_matrices.py). Which parameters are matrices of blocks is decided by
`parameter_groups` in config/parameter_groups.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, _muon

from zeroexp.config.keys import ConfigError, OptimizerConfig
from zeroexp.config.optimizer import OPTIMIZERS
from zeroexp.interface.quantized_moments import at_rest, to_step
from zeroexp.interface.whole_matrices import WholeMatrices

ADJUSTMENTS = ("match_rms_adamw", "original")
COEFFICIENTS = _muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C


class Muon(Optimizer):
    """As torch.optim.Muon, bit for bit, of tensors that may be pieces of matrices."""

    matrices = WholeMatrices()

    def __init__(
        self, groups: Iterable[dict[str, Any]], moments_dtype: torch.dtype | None, **defaults: Any
    ):
        """defaults: lr, weight_decay, momentum, nesterov and adjust_lr_fn of each group, and ns_steps of all.

        Groups have the keys of torch's own, so that it takes our checkpoints.
        """
        self._ns_steps = defaults["ns_steps"]
        super().__init__(groups, {**defaults, "ns_coefficients": COEFFICIENTS, "eps": _muon.EPS})
        self.moments_dtype = moments_dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        held = [(p, group) for group in self.param_groups for p in group["params"]]
        held = [(p, group) for p, group in held if p.grad is not None]
        values = [self._momentum(p, p.grad, group) for p, group in held]
        directions = self.matrices.apply(self._orthogonalize, [p for p, _ in held], values)
        for (p, group), direction in zip(held, directions, strict=True):
            lr, shape = float(group["lr"]), torch.Size(self.matrices.shape_of(p))
            adjusted = _muon._adjust_lr(lr, group["adjust_lr_fn"], shape)
            p.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-adjusted)

    def _momentum(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Advance the momentum, and return what is orthogonalized; torch's kernel overwrites it."""
        own = self.state[p]
        if "momentum_buffer" not in own:
            own["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = to_step(own["momentum_buffer"], gradient)
        momentum.lerp_(gradient, 1 - group["momentum"])
        own["momentum_buffer"] = at_rest(momentum, self.moments_dtype)
        ahead = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return ahead.to(torch.bfloat16, copy=True)

    def _orthogonalize(self, matrix: Tensor) -> Tensor:
        return _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, self._ns_steps, _muon.EPS)


def make_muon(groups: Iterable[Any], config: OptimizerConfig) -> Optimizer:
    """Make it over groups of matrices. Raises ConfigError for settings that have no meaning."""
    settings = {**OPTIMIZERS["muon"].settings, **config.settings}
    steps, adjust = settings["ns_steps"], settings.pop("adjust_lr")
    if type(steps) is not int or not 1 <= steps < 100:
        raise ConfigError(f"optimizer.settings.ns_steps={steps}: no number of steps; use 1 to 99")
    if type(settings["nesterov"]) is not bool:
        raise ConfigError(f"optimizer.settings.nesterov={settings['nesterov']}: use true or false")
    if adjust not in ADJUSTMENTS:
        remedy = f"use {' or '.join(ADJUSTMENTS)}"
        raise ConfigError(f"optimizer.settings.adjust_lr={adjust}: unknown word; {remedy}")
    moments_dtype = getattr(torch, config.moments) if config.moments else None
    own = {name: getattr(config, name) for name in ("lr", "weight_decay", "momentum")}
    return Muon(groups, moments_dtype, adjust_lr_fn=adjust, **own, **settings)
