"""One process doing the obvious thing behind the Strategy interface, and what the loop called it to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroexp.interface.strategy import CanonicalState, CanonicalTensor, ModelStates, Piece


class PlainStrategy:
    """Gradients are summed over ranks in `step`, one parameter after the other; nothing is sharded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.calls: list[str] = []

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self.calls.append(f"lr={self.optimizer.param_groups[0]['lr']:g}")
        yield
        self.calls.append("last microbatch" if last else "microbatch")

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, *, drain: bool = False) -> Tensor:
        self.calls.append("step and drain" if drain else "step")
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
        norm = nn.utils.get_total_norm(gradients)
        self.optimizer.step()
        return norm

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")
        self.optimizer.zero_grad()

    def model_states(self) -> ModelStates:
        self.calls.append("model_states")
        parameters = list(self.model.parameters())
        return ModelStates(
            parameters=[p.data for p in parameters],
            gradients=[p.grad for p in parameters if p.grad is not None],
        )

    def state_dict(self) -> CanonicalState:
        return {
            name: {"weight": CanonicalTensor(tuple(p.shape), p.dtype, [Piece(0, p.data.flatten())])}
            for name, p in self.model.named_parameters()
        }

    def load_state_dict(self, state: CanonicalState) -> None:
        for name, parameter in self.model.named_parameters():
            (piece,) = state[name]["weight"].pieces
            parameter.data.copy_(piece.tensor.view(parameter.shape))
