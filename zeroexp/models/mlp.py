"""The residual MLP of the published memory table: x + down(gelu(up(x))), d -> 4d -> d."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from zeroexp.config.families import whole_numbers
from zeroexp.config.keys import ModelConfig


@dataclass(frozen=True)
class MlpShape:
    width: int  # d, elements of one vector
    depth: int  # number of blocks


class MlpBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Mlp(nn.Module):
    def __init__(self, shape: MlpShape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(shape.width) for _ in range(shape.depth))

    def forward(self, vectors: Tensor) -> Tensor:
        """Map [..., width] to [..., width], in the dtype of the parameters."""
        x = vectors.to(next(self.parameters()).dtype)
        for block in self.blocks:
            x = block(x)
        return x


def build(config: ModelConfig, vocab_size: int | None) -> Mlp:
    return Mlp(whole_numbers(MlpShape, config.mlp, "model.mlp"))
