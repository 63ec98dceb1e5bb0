"""Ranks start alike: with the same settings, the same model and the same weights."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.comm.collectives import Collectives
from zeroexp.interface.values import Values
from zeroexp.process import world as worlds

ELEMENTS_AT_ONCE = 1 << 18  # what a sum of bits takes at once, since it needs 16 bytes for each


def start_alike(
    module: nn.Module,
    settings: Sequence[Any],
    param_groups: Sequence[dict[str, Any]],
    values: Values | None,
    wire: Collectives,
) -> None:
    """Give all ranks the weights of rank 0. Raises ValueError on all of them if settings or models differ."""
    agree_on_settings([*settings, describe_param_groups(module, param_groups)], wire)
    agree_on_weights(module, wire, values)


def describe_param_groups(module: nn.Module, param_groups: Sequence[dict[str, Any]]) -> str:
    """Return words for the parameter groups, which must be equal on every rank."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return repr(
        [
            {k: [names[p] for p in v] if k == "params" else v for k, v in group.items()}
            for group in param_groups
        ]
    )


def agree_on_settings(settings: Sequence[Any], wire: Collectives) -> None:
    """Raise ValueError on all ranks if they were given different settings."""
    if not wire.same_everywhere(zlib.crc32(repr(settings).encode())):
        raise ValueError(
            "ranks were given different settings (stage, options, dtypes, max_grad_norm, blocks or param_groups): "
            f"give the same on each; here {settings[0]}, {settings[1]}"
        )


def agree_on_weights(module: nn.Module, wire: Collectives, values: Values | None = None) -> None:
    """Give every rank the weights of rank 0, as DistributedDataParallel does; they are sent only if they differ.

    Raises ValueError where names, shapes, dtypes or `requires_grad` differ, and where `values` do, since no rank has
    them all.
    """
    if wire.world.size == 1 or wire.world.is_fake:
        return
    shapes = [
        f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}"
        for name, p in module.named_parameters()
    ]
    if not wire.same_everywhere(zlib.crc32("\n".join(shapes).encode())):
        raise ValueError(
            "ranks have different models (names, shapes, dtypes or what is frozen): build the same model on each"
        )
    tensors: list[Tensor] = list(module.buffers())
    if values is None:
        tensors += module.parameters()
    elif not wire.same_everywhere(values.fingerprint()):
        raise ValueError(
            "ranks would start from different weights: give each the same seed and the same files"
        )
    sums = [sum_of_bits(tensor) for tensor in tensors]
    if wire.same_everywhere(zlib.crc32(repr(sums).encode())):
        return
    if wire.world.rank == 0:
        warnings.warn("ranks start from different weights: all take those of rank 0", stacklevel=4)
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        worlds.broadcast(whole)
        tensor.detach().copy_(whole)


def sum_of_bits(tensor: Tensor) -> int:
    """Return a sum over the bits of the values, each times its place; other values almost certainly have another sum.

    A plain sum would be that of the same values in another order too. Products and sums wrap around.
    """
    flat = tensor.detach().reshape(-1)
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.itemsize, torch.uint8)
    total = 0
    for index, part in enumerate(flat.view(as_integers).split(ELEMENTS_AT_ONCE)):
        places = torch.arange(1, len(part) + 1, device=part.device)
        total += (2 * index + 1) * int((places * part).sum())
    return total
