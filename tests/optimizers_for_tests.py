"""Optimizers that nobody here wrote for sharding, in the habits of published ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class CountingAverage(Optimizer):
    """As ScheduleFree does: Python numbers count in the group, and an average is weighted by them."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "lr_max": -1.0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["lr_max"] = max(group["lr"], group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2 / 3
            for parameter in (p for p in group["params"] if p.grad is not None):
                average = self.state[parameter].setdefault("z", parameter.clone())
                average.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(average, group["lr_max"] ** 2 / 3 / group["weight_sum"])
                parameter.mul_(1 - 1e-3 / (1 + group["k"]))
            group["k"] += 1


class OldFashioned(Optimizer):
    """What optimizers kept before torch made `step` a tensor: an int, a float, a bool and None by parameter."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(step=0, decay=1.0, even=True, history=None)
                state["step"] += 1
                state["decay"] *= 0.7
                state["even"] = not state["even"]
                if state["step"] == 3:
                    state["history"] = torch.zeros_like(parameter)
                if state["history"] is not None:
                    state["history"].add_(parameter.grad)
                    parameter.sub_(state["history"], alpha=1e-3)
                sign = 1.0 if state["even"] else 0.5
                parameter.sub_(parameter.grad, alpha=group["lr"] * sign / state["step"])
                parameter.mul_(1 - 0.1 * state["decay"])


class OneDistance(Optimizer):
    """As Prodigy does: how far all parameters went together makes everybody's rate."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-6, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        denominator = 0.0
        for group in self.param_groups:
            for parameter in group["params"]:
                first = self.state[parameter].setdefault("x0", parameter.clone())
                group["numerator"] += float((parameter.grad * (first - parameter)).sum())
                denominator += float(parameter.grad.abs().sum())
        for group in self.param_groups:
            group["d"] = max(group["d"], group["numerator"] / denominator)
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * group["d"])


class OneNorm(torch.optim.SGD):
    """Clips inside of step, by the norm of all it has."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        super().step()


class TrustRatio(torch.optim.SGD):
    """As LAMB does: the norm of each tensor makes its rate."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad.mul_(parameter.detach().norm() / parameter.grad.norm())
        super().step()


class LateFactors(torch.optim.SGD):
    """As Shampoo does: collects what it will need for its matrices, and does not use it yet."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim == 2:
                self.state[parameter]["GG"] = [parameter.grad @ parameter.grad.T]
        super().step()


class FactorsLarge(torch.optim.SGD):
    """As many do, from a size on that pays for it."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim == 2 and min(parameter.shape) >= 100:
                self.state[parameter]["rows"] = parameter.grad.square().mean(1)
        super().step()


class Noisy(torch.optim.SGD):
    """As SGLD does."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad.add_(torch.randn_like(parameter))
        super().step()


class KeepsElsewhere(torch.optim.SGD):
    """State under a word, which belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        state: dict[Any, Any] = self.state
        state["calls"] = Tensor([0.0])
        super().step()
