"""Moments that rest in fewer bytes than the weights: an optimizer of torch steps some tensors after the other.

    at rest      moments in bfloat16, or in 8 bits (interface/quantized_moments.py)
    in a step    moments of a batch of tensors, in the weights' dtype -> torch's update -> rounded to the nearest

What a moment is rounded to depends on this one element and its block, so that it is the same however a parameter is
cut: torch's fused kernel, which computes the last elements of a piece in other instructions, is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroexp.config.keys import OptimizerConfig
from zeroexp.config.optimizer import OPTIMIZERS
from zeroexp.interface.quantized_moments import at_rest, lies_in_blocks, to_step

# Elements whose moments are wide at once; a larger tensor is a batch by itself.
BATCH_NUMEL = 1 << 20


class RoundedMoments(Optimizer):
    """The optimizer that `make` returns, whose moments rest in `moments_dtype`."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], Optimizer],
        moments_dtype: torch.dtype,
    ):
        super().__init__(groups, {})
        self.moments_dtype = moments_dtype
        self._inner = make(self.param_groups)  # which shares the groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        self._inner.state = self.state  # which may be that of an optimizer around this one
        of_groups = [(group, group["params"]) for group in self.param_groups]
        try:
            for group, _ in of_groups:
                group["params"] = []
            for group, parameters in of_groups:
                for batch in _batches([p for p in parameters if p.grad is not None]):
                    group["params"] = batch
                    self._step_batch(batch)
                group["params"] = []
        finally:
            for group, parameters in of_groups:
                group["params"] = parameters

    def _step_batch(self, batch: Sequence[Tensor]) -> None:
        for parameter in batch:
            own = self.state.get(parameter, {})
            own.update({key: to_step(own[key], parameter) for key in _of_elements(own, parameter)})
        self._inner.step()
        for parameter in batch:
            own = self.state.get(parameter, {})
            for key in _of_elements(own, parameter):
                own[key] = at_rest(own[key], self.moments_dtype)


def _of_elements(own: dict[str, Any], parameter: Tensor) -> list[str]:
    """Return the keys of what is kept for each element of a parameter; the number of steps is none of these."""
    return [
        key
        for key, value in own.items()
        if key != "step"
        and isinstance(value, Tensor)
        and (
            value.shape == parameter.shape
            or lies_in_blocks(value.dtype, value.shape, parameter.shape)
        )
    ]


def _batches(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters in order, as many at once as BATCH_NUMEL allows."""
    batch: list[Tensor] = []
    for parameter in parameters:
        if batch and sum(p.numel() for p in batch) + parameter.numel() > BATCH_NUMEL:
            yield batch
            batch = []
        batch.append(parameter)
    if batch:
        yield batch


def make_rounded(groups: Iterable[Any], config: OptimizerConfig) -> Optimizer:
    """Make the configured optimizer with moments in the dtype `config.moments`."""
    plain = replace(config, fused=False, moments=None)
    make = OPTIMIZERS[config.name].make
    return RoundedMoments(
        groups, lambda shared: make(shared, plain), getattr(torch, config.moments or "")
    )
