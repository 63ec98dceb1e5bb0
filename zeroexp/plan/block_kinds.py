"""Tell which blocks of a model are of one kind: made of the same, but for the numbers that they have in its list."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

Kind = frozenset[tuple[str, Any]]


def kinds_of(module: nn.Module, blocks: Sequence[str]) -> list[Kind]:
    """Return the kind of each of the named blocks."""
    made = [_made_of(module.get_submodule(name)) for name in blocks]
    numbers = {
        name
        for name in (made[0] if made else ())
        if all(block.get(name) == index for index, block in enumerate(made))
    }
    return [frozenset(b.items() - {(n, b[n]) for n in numbers}) for b in made]


def _made_of(block: nn.Module) -> dict[str, Any]:
    """Return the classes and plain settings of all modules inside, and the shapes of parameters and buffers."""
    found: dict[str, Any] = {}
    for prefix, module in block.named_modules():
        found[prefix] = type(module).__qualname__
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
        found |= {f"{prefix}:{name}": value for name, value in plain.items()}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        found[f"{name}()"] = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    return found
