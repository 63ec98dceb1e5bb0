"""Parameter groups, as torch.optim takes them: which parameters are stepped alike, and which have no weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zeroexp.config.keys import ConfigError, OptimizerConfig
from zeroexp.config.optimizer import (
    OF_ENGINE,
    OPTIMIZERS,
    kind_of_matrices,
    optimizers_of,
    row_of_kind,
)
from zeroexp.config.parameter_kinds import kinds_of_parameters, rows_of_parameters
from zeroexp.cut.moment_blocks import LEAST_NUMEL, is_blockwise, kind_in_blocks, kind_in_full

if TYPE_CHECKING:
    from torch import nn

OF_BLOCKS = {"matrices", "experts", "routers"}  # kinds of parameters that may be matrices of blocks


def parameter_groups(
    module: nn.Module, config: OptimizerConfig, blocks: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the groups of each kind in `optimizers_of`, with and without weight decay, in the form torch.optim takes.

    Norms and biases, which have fewer than two dimensions, do not decay, unless their row says how they do. Frozen
    parameters are in no group and a tied parameter appears once. If all parameters of a kind decay alike, they are one
    group. A group of another kind than the line's own names it, and what its learning rate is of the line's.
    """
    row_of = rows_of_parameters(module, blocks, config.kinds)
    kinds, by_kind = kinds_of_parameters(module, blocks), optimizers_of(config)
    matrices = {p for p, kind in kinds.items() if kind in OF_BLOCKS and p.ndim == 2}
    groups: list[dict[str, Any]] = []
    for kind, own in by_kind.items():
        row = row_of_kind(kind)
        mine = [p for p, of in row_of.items() if of == row]
        if kind_of_matrices(row) in by_kind:
            mine = [p for p in mine if (p in matrices) == OPTIMIZERS[own.name].whole_matrices]
        if kind_in_blocks(kind_in_full(kind)) in by_kind:
            is_large = is_blockwise(kind)
            mine = [p for p in mine if (p.numel() >= LEAST_NUMEL) == is_large]
        all_decay = own.decay_norms_and_biases or "weight_decay" in config.kinds.get(row, {})
        all_decay = all_decay or own.weight_decay == 0
        plain = [] if all_decay else [p for p in mine if p.ndim < 2]
        decayed = [p for p in mine if all_decay or p.ndim >= 2]
        named: dict[str, Any] = {"kind": kind} if kind else {}
        if own.lr != config.lr:
            named["lr_scale"] = own.lr / config.lr
        of_row = config.kinds.get(row, {})
        named.update({key: of_row[key] for key in OF_ENGINE if key in of_row})
        groups.append({"params": decayed, "weight_decay": own.weight_decay, **named})
        groups.append({"params": plain, "weight_decay": 0.0, **named})
    groups = [group for group in groups if group["params"]]
    _require_matrices(config, {kind_in_full(group.get("kind", "")) for group in groups})
    return groups


def describe_groups(groups: Sequence[dict[str, Any]], config: OptimizerConfig) -> str:
    """Return what is stepped how: each kind of groups with its number of parameters and its settings."""
    lines: list[str] = []
    for kind, own in optimizers_of(config).items():
        mine = [group for group in groups if group.get("kind", "") == kind]
        numel = sum(p.numel() for group in mine for p in group["params"])
        decays = "/".join(f"{group['weight_decay']:g}" for group in mine)
        moments = f" moments {own.moments}" if own.moments else ""
        if mine:
            of_row = "".join(f" {key} {mine[0][key]}" for key in OF_ENGINE if key in mine[0])
            how = f"{own.name} lr {own.lr:g} decay {decays}{moments}{of_row}"
            what = row_of_kind(kind) or ("matrices" if kind_in_full(kind) else "all else")
            lines.append(f"{what}: {numel:,} by {how}")
    return "; ".join(lines)


def _require_matrices(config: OptimizerConfig, kinds: set[str]) -> None:
    """Raise ConfigError where an optimizer that steps matrices of blocks alone was named and finds none."""
    rows = [row for row, own in config.kinds.items() if "name" in own]
    named = {f"optimizer.kinds.{row}.name": (config.kinds[row]["name"], [row]) for row in rows}
    named["optimizer.name"] = config.name, ["", *(row for row in config.kinds if row not in rows)]
    for key, (name, of_rows) in named.items():
        if OPTIMIZERS[name].whole_matrices and kinds.isdisjoint(map(kind_of_matrices, of_rows)):
            problem = "no block of the model has a trainable matrix"
            raise ConfigError(f"{key}={name}: {problem}; use adamw")
