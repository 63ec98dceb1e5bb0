"""The loops of muon_peers.py that plain torch has for Muon: FSDP2 with gathers, DDP with whole matrices on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon

from zeroexp.config.keys import OptimizerConfig
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.cut.chunk import MATRIX
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World

DECAY = 0.1
CONFIG = OptimizerConfig(name="muon", momentum=0.95, weight_decay=DECAY, max_grad_norm=None)
MUON: dict[str, Any] = {"lr": CONFIG.lr, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 5}
NONE = nn.Parameter(torch.zeros(1, 1))  # of a rank that has no parameter of an optimizer


class Peer:
    """A loop of plain torch; on one rank it is the process that all others are compared with."""

    def __init__(self, model: BuiltModel, world: World):
        self._world, self.inner = world, model.module
        # Of each name whether Muon steps it, and its decay, as our groups have them.
        names = {p: name for name, p in model.module.named_parameters()}
        groups = parameter_groups(model.module, CONFIG, model.blocks)
        of = {p: (g.get("kind") == MATRIX, g["weight_decay"]) for g in groups for p in g["params"]}
        self._of = {names[p]: each for p, each in of.items()}
        self.model = self.wrapped(model)
        self._named: dict[str, Any] = dict(self.inner.named_parameters())
        self._momenta: dict[str, Tensor] = {}
        self._steps = self.steps()

    def wrapped(self, model: BuiltModel) -> nn.Module:
        return model.module

    def steps(self) -> list[Callable[[], object]]:
        return self.optimizers(self._of)

    def optimizers(self, names: Iterable[str]) -> list[Callable[[], object]]:
        """Return the steps of torch's AdamW and Muon on the parameters of these names."""
        mine = [(self._named[name], *self._of[name]) for name in names]
        rest = [
            {"params": [p], "weight_decay": decay} for p, is_matrix, decay in mine if not is_matrix
        ]
        matrices = [p for p, is_matrix, _ in mine if is_matrix]
        adamw = AdamW(rest or [NONE], lr=CONFIG.lr, betas=(0.9, 0.95), fused=True)
        return [adamw.step, Muon(matrices or [NONE], weight_decay=DECAY, **MUON).step]

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        (loss * self._world.size).backward()  # these engines average over ranks

    def step(self, *, drain: bool = False) -> Tensor:
        for step in self._steps:
            step()
        return torch.zeros(())

    def zero_grad(self) -> None:
        self.inner.zero_grad()


class Fsdp2Gather(Peer):
    def wrapped(self, model: BuiltModel) -> Any:
        for block in model.blocks:
            fully_shard(model.module.get_submodule(block))
        return fully_shard(model.module)

    def steps(self) -> list[Callable[[], object]]:
        rest = [name for name, (is_matrix, _) in self._of.items() if not is_matrix]
        return [self.optimizers(rest)[0], self._step_matrices]

    @torch.no_grad()
    def _step_matrices(self) -> None:
        for name in (name for name, (is_matrix, _) in self._of.items() if is_matrix):
            parameter = self._named[name]
            gradient = parameter.grad
            momentum = self._momenta.setdefault(name, torch.zeros_like(gradient))
            momentum.lerp_(gradient, 1 - CONFIG.momentum)
            ahead: Any = gradient.lerp(momentum, CONFIG.momentum)
            # torch's Muon of the whole matrix, with the momentum taken already; its decay is of each element.
            whole = nn.Parameter(torch.zeros(parameter.shape))
            whole.grad = ahead.bfloat16().full_tensor().float()
            Muon([whole], momentum=0, nesterov=False, weight_decay=0, **MUON).step()
            first = parameter.device_mesh.get_local_rank() * -(-len(whole) // self._world.size)
            local = parameter.to_local()
            local.mul_(1 - CONFIG.lr * DECAY).add_(whole[first : first + len(local)])


class Layerwise(Peer):
    def wrapped(self, model: BuiltModel) -> nn.Module:
        return DistributedDataParallel(model.module, gradient_as_bucket_view=True)

    def steps(self) -> list[Callable[[], object]]:
        """Give the ranks whole parameters, the largest first, each to whom has the least of its optimizer so far."""
        loads = {is_matrix: [0] * self._world.size for is_matrix in (False, True)}
        self._owner: dict[str, int] = {}
        for name in sorted(self._of, key=lambda name: -self._named[name].numel()):
            load = loads[self._of[name][0]]
            self._owner[name] = load.index(min(load))
            load[self._owner[name]] += self._named[name].numel()
        mine = [name for name, owner in self._owner.items() if owner == self._world.rank]
        return [*self.optimizers(mine), self._broadcast]

    def _broadcast(self) -> None:
        for name, owner in self._owner.items():
            dist.broadcast(self._named[name].data, src=owner)
