"""Models of a millisecond, written as people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.strangers.lab import CLASSES, VOCABULARY, WIDTH


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 7)
        self.down = nn.Linear(7, width, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Net(nn.Module):
    """A root with an input and a head of its own around `depth` blocks."""

    def __init__(self, block: type[nn.Module] = Block, depth: int = 3, seed: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.inp = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(block() for _ in range(depth))
            self.head = nn.Linear(WIDTH, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Language(nn.Module):
    """Token ids to logits; embedding and head are one weight."""

    def __init__(self, *, tied: bool = True, depth: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(depth))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + x.cumsum(1) / ids.shape[1]
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


class Shortened(Net):
    """Leaves after `depth` blocks, as early exits and probes of hidden layers do."""

    depth = 3

    def body(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers[: self.depth]:
            x = layer(x)
        return x
