"""torch.compile of each block (`train.compile`): one graph where a block's forward can be traced whole.

Only `forward` is compiled, so hooks on the block, which gather and free, run outside of the graph. Blocks of one class
and shape share a compiled graph. A block that recomputes is compiled with its recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zeroexp.config.keys import TrainConfig


def compile_as_configured(module: nn.Module, blocks: Sequence[str], train: TrainConfig) -> None:
    """Have each block, named as in `BuiltModel.blocks`, compiled at its first call, if the config says so."""
    if not train.compile:
        return
    for name in blocks:
        block = module.get_submodule(name)
        block.forward = torch.compile(block.forward)


def graphs_compiled() -> dict[str, int]:
    """Return how many graphs this process has compiled, and where a trace broke off in two."""
    from torch._dynamo.utils import counters

    breaks = sum(counters["graph_break"].values())
    return {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": breaks}
