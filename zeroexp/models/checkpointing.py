"""Activation checkpointing: a block keeps only its inputs and recomputes its activations in backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(module: nn.Module, blocks: Iterable[str]) -> None:
    """Make each block, named as in `BuiltModel.blocks`, recompute its activations; this changes `module` in place.

    Only `forward` is wrapped, so hooks on the block run outside of the recomputation: a block is gathered once before
    backward, and not again by its own recomputation.
    """
    for name in blocks:
        block = module.get_submodule(name)
        block.forward = _recomputed(block.forward)


def _recomputed(forward):
    @functools.wraps(forward)
    def recomputed(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed
