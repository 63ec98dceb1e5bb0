"""The first weights of a model whose parameters are on meta: engines ask for ranges of them, one parameter at a time.

A model that was built on meta has shapes and no values. An engine first makes room for what its rank holds. Then it
goes through the values once and copies the ranges that it needs, so that no more than one parameter is whole at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

# `read(start, stop)` returns these elements of one flattened parameter, on the CPU. It may be called until the next
# parameter is asked for.
Read = Callable[[int, int], Tensor]


class Values(Protocol):
    """The values are the same on every rank, whatever parts of them it reads."""

    def __iter__(self) -> Iterator[tuple[str, Read]]:
        """Yield every parameter once, by its name in `named_parameters()`, in any order."""
        ...

    def fingerprint(self) -> int:
        """Return a number that differs, almost certainly, between ranks that would read other values."""
        ...


def swap_in(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Put `tensor`, which may be on another device, into `parameter`, which stays the same object."""
    made = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, made)


def make_placeholders(module: nn.Module, device: torch.device) -> None:
    """Put parameters from meta onto `device`, each in its shape over the memory of one element."""
    _drop_weak_references(module)
    for parameter in module.parameters():
        if parameter.is_meta:
            one = torch.zeros((), dtype=parameter.dtype, device=device)
            swap_in(parameter, one.expand(parameter.shape))


def fill_in(module: nn.Module, values: Values, device: torch.device | str = "cpu") -> None:
    """Give every parameter of `module` its values, whole, in its own dtype on `device`; buffers move there too."""
    _drop_weak_references(module)
    named = dict(module.named_parameters())
    for name, read in values:
        parameter = named[name]
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        whole.view(-1).copy_(read(0, whole.numel()))
        swap_in(parameter, whole)
    module.to(device)


def _drop_weak_references(module: nn.Module) -> None:
    """Let torch's RNNs forget their weak references to weights, beside which no parameter can be exchanged.

    They serve to notice replaced weights, and None stands for one that is not watched.
    """
    for each in module.modules():
        if isinstance(each, nn.RNNBase):
            each._flat_weight_refs = [None] * len(each._flat_weights_names)
