"""The optimizers that `optimizer.name` may name: parameter groups, and a factory for rank-local optimizers.

An engine decides which tensors it optimizes (whole parameters, slices, flat pieces), so it receives the groups of the
model and a factory, never a finished optimizer. OPTIMIZERS holds the names; torch is imported only when an optimizer is
made. Learning rates are in training/learning_rate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zeroexp.config.keys import Config, ConfigError, OptimizerConfig
from zeroexp.config.parameter_kinds import kinds_of_parameters, rows_of_parameters
from zeroexp.cut.chunk import MATRIX
from zeroexp.cut.layout import LAYOUTS, Layout
from zeroexp.cut.moment_blocks import INT8, LEAST_NUMEL, is_blockwise, kind_in_blocks, kind_in_full
from zeroexp.registry import Later, Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

# What our engine does with the parameters of a row, and no optimizer reads.
OF_ENGINE = ("layout", "master", "over")
ROW_KEYS = ("name", "lr", "weight_decay", "moments", "settings", *OF_ENGINE)  # of every row
OF_BLOCKS = {"matrices", "experts", "routers"}  # kinds of parameters that may be matrices of blocks


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer.

    make: takes parameter groups as torch.optim does, and the OptimizerConfig, and returns the optimizer.
    num_moments: how many tensors of a weight's size it keeps for each weight, by which a plan counts its bytes.
    bytes_per_tensor: what it keeps beside them for each tensor.
    keys: the keys of `optimizer` that it reads beyond those that all read; other ones are refused.
    settings: its own keys below `optimizer.settings`, with their defaults.
    whole_matrices: it steps the matrices of blocks alone, and AdamW all else of its row. It rounds moments to
    `config.moments` itself (interface/quantized_moments.py), and asks for whole matrices (interface/whole_matrices.py).
    """

    make: Callable[[Iterable[Any], OptimizerConfig], torch.optim.Optimizer]
    num_moments: Callable[[OptimizerConfig], int]
    bytes_per_tensor: int = 0
    keys: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    whole_matrices: bool = False


def rows_of(config: OptimizerConfig) -> dict[str, OptimizerConfig]:
    """Return the settings of each row of `optimizer.kinds`, and of "", the line's own, which a row begins from."""
    rows = {"": replace(config, kinds={})}
    for row, own in config.kinds.items():
        name = own.get("name", config.name)
        settings = dict(OPTIMIZERS[name].settings) if name != config.name else config.settings
        settings = {**settings, **own.get("settings", {})}
        changed = {key: value for key, value in own.items() if key not in OF_ENGINE}
        rows[row] = replace(rows[""], **{**changed, "settings": settings})
    return rows


def layouts_of(config: Config) -> list[Layout]:
    """Return what our engine cuts parameters by: the layout of all, and those of rows that have their own."""
    rows = config.optimizer.kinds.values()
    own = (str(row["layout"]) for row in rows if isinstance(row, dict) and "layout" in row)
    return [LAYOUTS[word] for word in (config.strategy.implementation, *own) if word in LAYOUTS]


def master_of_kind(config: OptimizerConfig, kind: str) -> str | None:
    """Return the dtype of a kind's weights that the optimizer updates, where its row has one of its own."""
    return config.kinds.get(row_of_kind(kind), {}).get("master")


def overs_of(config: Config) -> list[str]:
    """Return over which ranks what the optimizer updates rests: that of all parameters, and those of rows."""
    rows = config.optimizer.kinds.values()
    return [config.strategy.optimizer.over, *(row["over"] for row in rows if "over" in row)]


def optimizers_of(config: OptimizerConfig) -> dict[str, OptimizerConfig]:
    """Return what steps the parameters of each kind of group: of its row, see `rows_of`.

    Of an optimizer that steps whole matrices alone, what is none of a block goes to AdamW. Of moments in 8 bits, large
    parameters alone have such, and are a kind of their own.
    """
    in_full: dict[str, OptimizerConfig] = {}
    for row, own in rows_of(config).items():
        if OPTIMIZERS[own.name].whole_matrices:
            in_full[kind_of_matrices(row)] = own
            own = replace(own, name="adamw", settings={})
        in_full[row] = own
    by_kind: dict[str, OptimizerConfig] = {}
    for kind, own in in_full.items():
        if own.moments == INT8:
            by_kind[kind_in_blocks(kind)] = own
            own = replace(own, moments=None, fused=False)
        by_kind[kind] = own
    return by_kind


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


def kind_of_matrices(row: str) -> str:
    """Return the kind of the groups of a row that are stepped as whole matrices."""
    return f"{row} {MATRIX}".strip()


def row_of_kind(kind: str) -> str:
    """Return the row of `optimizer.kinds` whose parameters a kind of groups has."""
    kind = kind_in_full(kind)
    return "" if kind == MATRIX else kind.removesuffix(f" {MATRIX}")


def _require_matrices(config: OptimizerConfig, kinds: set[str]) -> None:
    """Raise ConfigError where an optimizer that steps matrices of blocks alone was named and finds none."""
    rows = [row for row, own in config.kinds.items() if "name" in own]
    named = {f"optimizer.kinds.{row}.name": (config.kinds[row]["name"], [row]) for row in rows}
    named["optimizer.name"] = config.name, ["", *(row for row in config.kinds if row not in rows)]
    for key, (name, of_rows) in named.items():
        if OPTIMIZERS[name].whole_matrices and kinds.isdisjoint(map(kind_of_matrices, of_rows)):
            problem = "no block of the model has a trainable matrix"
            raise ConfigError(f"{key}={name}: {problem}; use adamw")


def optimizer_factory(
    config: OptimizerConfig,
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """Return a function that makes the configured optimizer over the groups or tensors an engine hands in."""
    by_kind = optimizers_of(config)

    def make(groups: Iterable[Any]) -> torch.optim.Optimizer:
        return make_one(groups, config) if len(by_kind) == 1 else _make_by_kind(groups, by_kind)

    return make


def make_one(groups: Iterable[Any], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer that steps all groups alike."""
    import torch

    kind = OPTIMIZERS[config.name]
    rounds_itself = config.moments is None or kind.whole_matrices
    made = (kind.make if rounds_itself else _make_rounded)(groups, config)
    if not isinstance(made, torch.optim.Optimizer):
        problem = f"its make returns a {type(made).__name__}"
        raise ConfigError(f"optimizer.name={config.name}: {problem}; return an optimizer")
    return made


_make_rounded = Later("zeroexp.training.rounded_moments:make_rounded")
_make_by_kind = Later("zeroexp.training.by_kind:OptimizerByKind")


def _adamw(groups: Iterable[Any], config: OptimizerConfig) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=config.fused,
    )


def _sgd(groups: Iterable[Any], config: OptimizerConfig) -> torch.optim.Optimizer:
    import torch

    groups = list(groups)
    tensors = [each["params"] if isinstance(each, dict) else [each] for each in groups]
    return torch.optim.SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        # torch has no fused SGD for the shards of FSDP2, which are DTensors
        fused=config.fused and not any(hasattr(p, "placements") for each in tensors for p in each),
    )


OPTIMIZERS = Registry(
    "optimizer.name",
    {
        "adamw": OptimizerKind(
            _adamw,
            num_moments=lambda config: 2,
            bytes_per_tensor=4,  # its number of steps
            keys=("betas", "eps"),
        ),
        "sgd": OptimizerKind(
            _sgd, num_moments=lambda config: int(config.momentum > 0), keys=("momentum",)
        ),
        "muon": OptimizerKind(
            Later("zeroexp.training.muon:make_muon"),
            num_moments=lambda config: 1,
            keys=("betas", "eps", "momentum"),
            settings={"nesterov": True, "ns_steps": 5, "adjust_lr": "match_rms_adamw"},
            whole_matrices=True,
        ),
    },
    needs="an OptimizerKind(make=function, num_moments=function)",
    fits=lambda value: isinstance(value, OptimizerKind),
    arguments=lambda kind: {"make": 2, "num_moments": 1},
)
