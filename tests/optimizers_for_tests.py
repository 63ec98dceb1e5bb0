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
    def step(self, closure: Any = None) -> None:
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
    def step(self, closure: Any = None) -> None:
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
    def step(self, closure: Any = None) -> None:
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

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        super().step()


class TrustRatio(torch.optim.SGD):
    """As LAMB does: the norm of each tensor makes its rate."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad.mul_(parameter.detach().norm() / parameter.grad.norm())
        super().step()


class Cautious(torch.optim.SGD):
    """Leaves out what its momentum and the gradient disagree on, and divides the rest by its share."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            momentum = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            momentum.lerp_(parameter.grad, 0.1)
            agree = (momentum * parameter.grad > 0).to(parameter.dtype)
            parameter.grad.copy_(momentum * agree / agree.mean().clamp(min=1e-3))
        super().step()


class Projecting(torch.optim.Adam):
    """As AdamP does: where the gradient is orthogonal to a matrix, no step goes along it."""

    def step(self, closure: Any = None) -> None:
        with_dimensions = [p for g in self.param_groups for p in g["params"] if p.ndim > 1]
        before = [p.detach().clone() for p in with_dimensions]
        super().step()
        for parameter, old in zip(with_dimensions, before, strict=True):
            norm, gradient = old.norm(), parameter.grad
            if (gradient * old).sum().abs() < 0.1 * norm * gradient.norm() / old.numel() ** 0.5:
                moved = parameter.detach() - old
                parameter.data.sub_(old * (moved * old).sum() / norm.square())


class Windowed(torch.optim.SGD):
    """As AdaShift does: divides by what a tensor's gradients were in the mean, ten steps before."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            window = self.state[parameter].setdefault("window", [])
            window.append(parameter.grad.clone())
            if len(window) > 10:
                parameter.grad.div_(1 + window.pop(0).abs().mean())
        super().step()


class OwnRate(torch.optim.SGD):
    """Sets its own learning rate by what it has seen, for steps to come."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["next_lr"] = sum(float(p.grad.norm()) for p in group["params"])


class LateFactors(torch.optim.SGD):
    """As Shampoo does: collects what it will need for its matrices, and does not use it yet."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim == 2:
                self.state[parameter]["GG"] = [parameter.grad @ parameter.grad.T]
        super().step()


class FactorsLarge(torch.optim.SGD):
    """As many do, from a size on that pays for it."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim == 2 and min(parameter.shape) >= 100:
                self.state[parameter]["rows"] = parameter.grad.square().mean(1)
        super().step()


class Noisy(torch.optim.SGD):
    """As SGLD does."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad.add_(torch.randn_like(parameter))
        super().step()


class KeepsElsewhere(torch.optim.SGD):
    """State under a word, which belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        state: dict[Any, Any] = self.state
        state["calls"] = Tensor([0.0])
        super().step()
