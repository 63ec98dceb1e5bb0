"""Engines only the benchmark knows: the limit of physics, and DeepSpeed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.config.keys import Config
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World

BUCKET_ELEMENTS = 5_000_000  # of DeepSpeed: 20 MB in float32, about DDP's bucket


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
            parameter.register_post_accumulate_grad_hook(_drop)

    def microbatch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, *, drain: bool = False) -> Tensor:
        if self._wire is not None and self._piece.grad is not None:
            self._piece.grad.copy_(self._wire)
        self._optimizer.step()
        if self._wire is not None:
            self._wire.copy_(self._piece.detach())
        return torch.zeros(())

    def zero_grad(self) -> None:
        pass  # each gradient is gone already


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


class Plain:
    """The loop anybody writes for one device; with another master dtype, on copies that the optimizer updates."""

    def __init__(self, config: Config, model: BuiltModel, world: World) -> None:
        assert world.size == 1 or world.backend == "fake", "plain PyTorch knows no other ranks"
        self.model, compute, master = _in_compute_dtype(model.module, config)
        self._parameters = list(self.model.parameters())
        self._max_grad_norm = config.optimizer.max_grad_norm
        self._masters: list[Tensor] = []
        if master != compute:
            self._masters = [p.detach().to(master).requires_grad_() for p in self._parameters]
        self._optimizer = optimizer_factory(config.optimizer)(self._masters or self._parameters)

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


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def deepspeed(*, stage: int) -> Callable[[Config, BuiltModel, World], DeepSpeed]:
    return lambda config, model, world: DeepSpeed(config, model, world, stage=stage)


class DeepSpeed:
    """DeepSpeed's engine over the process group that is there already, with torch's fused AdamW."""

    def __init__(self, config: Config, model: BuiltModel, world: World, *, stage: int) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed = importlib.import_module("deepspeed")
        deepspeed.init_distributed(dist_backend=world.backend, auto_mpi_discovery=False)
        optimizer = optimizer_factory(config.optimizer)(model.module.parameters())
        self.model, *_ = deepspeed.initialize(
            model=model.module, optimizer=optimizer, config=_deepspeed_config(config, stage)
        )

    def microbatch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def step(self, *, drain: bool = False) -> Tensor:
        self.model.step()
        return torch.zeros(())

    def zero_grad(self) -> None:
        pass  # its step does it


def _deepspeed_config(config: Config, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": config.data.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.max_grad_norm or 0.0,
        "bf16": {"enabled": config.precision.compute == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            # Elements. Its defaults, of 500M and 50M, are memory set aside for models a hundred times as large.
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
        },
        "steps_per_print": 10**9,
    }
