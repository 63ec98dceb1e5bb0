"""What only the benchmark knows: the limit of physics, and the loops anybody writes."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeroexp.config.keys import Config
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World


def _in_compute_dtype(
    module: nn.Module, config: Config
) -> tuple[nn.Module, torch.dtype, torch.dtype]:
    """(module with parameters of the compute dtype, that dtype, dtype of the weights the optimizer updates)."""
    compute = getattr(torch, config.precision.compute)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(compute)
    return module, compute, getattr(torch, config.precision.master)


class Limit:
    """What no engine can beat: forward, backward and fused AdamW on 1/N of the elements; nothing is sent.

    Each gradient is dropped as it comes, since every engine has to do more with it.
    """

    def __init__(self, config: Config, model: BuiltModel, world: World) -> None:
        self.model, compute, master = _in_compute_dtype(model.module, config)
        num_elements = sum(parameter.numel() for parameter in self.model.parameters())
        share = math.ceil(num_elements / world.size)
        self._piece = nn.Parameter(torch.zeros(share, dtype=master, device=world.device))
        self._piece.grad = torch.full_like(self._piece, 1e-3)
        # Another dtype is cast on the way in and on the way out.
        self._wire = (
            torch.zeros(share, dtype=compute, device=world.device) if compute != master else None
        )
        self._optimizer = optimizer_factory(config.optimizer)([self._piece])
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._move)

    def microbatch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def _move(self, parameter: Tensor) -> None:
        parameter.grad = None

    def step(self, *, drain: bool = False) -> Tensor:
        if self._wire is not None and self._piece.grad is not None:
            self._piece.grad.copy_(self._wire)
        self._optimizer.step()
        if self._wire is not None:
            self._wire.copy_(self._piece.detach())
        return torch.zeros(())

    def zero_grad(self) -> None:
        pass  # each gradient is gone already


class Copies(Limit):
    """The limit, and what ranks that share memory copy to exchange gradients and weights; nobody waits for anybody.

    What others sum of a gradient is cast and laid out for them, what they have laid out is added to the own share, and
    weights that others updated are copied after the step; with `gathers` all weights are, before forward and before
    backward. The memory that is read is a buffer's, of no meaning.
    """

    def __init__(
        self, config: Config, model: BuiltModel, world: World, *, gathers: bool = False
    ) -> None:
        super().__init__(config, model, world)
        self._parameters, self._gathers = list(self.model.parameters()), gathers
        reduce = getattr(torch, config.precision.reduce)
        most = max(parameter.numel() for parameter in self._parameters)
        # What is read was written some time before.
        self._slots = [torch.zeros(most, dtype=reduce) for _ in range(4)]
        self._num_peers, self._num_moved = world.size - 1, 0
        sizes = [math.ceil(parameter.numel() / world.size) for parameter in self._parameters]
        sums = torch.zeros(sum(sizes), dtype=reduce).split(sizes)
        self._sums: dict[Tensor, Tensor] = dict(zip(self._parameters, sums, strict=True))
        self._weights = [torch.zeros_like(parameter).view(-1) for parameter in self._parameters]

    def microbatch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        if self._gathers:
            self._copy_weights(whole=True)
        return super().microbatch(last=last)

    def backward(self, loss: Tensor) -> None:
        if self._gathers:
            self._copy_weights(whole=True)
        super().backward(loss)

    def step(self, *, drain: bool = False) -> Tensor:
        norm = super().step(drain=drain)
        if not self._gathers:
            self._copy_weights(whole=False)
        return norm

    def _move(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, total = parameter.grad.view(-1), self._sums[parameter]
        laid_out, read = (self._slots[(self._num_moved + i) % 4] for i in (0, 1))
        self._num_moved += 1
        laid_out[: gradient.numel() - total.numel()].copy_(gradient[total.numel() :])
        total.copy_(gradient[: total.numel()])
        for _ in range(self._num_peers):
            total.add_(read[: total.numel()])
        super()._move(parameter)

    def _copy_weights(self, *, whole: bool) -> None:
        for parameter, weights in zip(self._parameters, self._weights, strict=True):
            first = 0 if whole else self._sums[parameter].numel()
            parameter.data.view(-1)[first:].copy_(weights[first:])  # no write that autograd sees


class Plain:
    """The loop anybody writes for one device; with another master dtype, on copies that the optimizer updates."""

    def __init__(self, config: Config, model: BuiltModel, world: World) -> None:
        module, compute, master = _in_compute_dtype(model.module, config)
        self.model = self._wrapped(module, world)
        self._parameters = list(module.parameters())
        self._max_grad_norm = config.optimizer.max_grad_norm
        self._masters: list[Tensor] = []
        if master != compute:
            self._masters = [p.detach().to(master).requires_grad_() for p in self._parameters]
        self._optimizer = optimizer_factory(config.optimizer)(self._masters or self._parameters)

    def _wrapped(self, module: nn.Module, world: World) -> nn.Module:
        assert world.size == 1 or world.backend == "fake", "plain PyTorch knows no other ranks"
        return module

    def microbatch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, *, drain: bool = False) -> Tensor:
        for parameter, master in zip(self._parameters, self._masters, strict=False):
            assert parameter.grad is not None
            master.grad = parameter.grad.to(master.dtype)
            parameter.grad = None
        norm = torch.zeros(())
        if self._max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._masters or self._parameters, self._max_grad_norm)
        self._optimizer.step()
        for parameter, master in zip(self._parameters, self._masters, strict=False):
            parameter.data.copy_(master)
        return norm

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


class DdpWithMaster(Plain):
    """DistributedDataParallel of a model in the compute dtype, beside the copies that the optimizer updates."""

    def _wrapped(self, module: nn.Module, world: World) -> nn.Module:
        return DistributedDataParallel(module, gradient_as_bucket_view=True)
