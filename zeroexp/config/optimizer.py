"""The optimizers that `optimizer.name` may name, which of them steps which kind, and a factory for rank-local ones.

An engine decides which tensors it optimizes (whole parameters, slices, flat pieces), so it receives the groups of the
model (parameter_groups.py) and a factory, never a finished optimizer. OPTIMIZERS holds the names; torch is imported
only when an optimizer is made. Learning rates are in training/learning_rate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zeroexp.config.keys import Config, ConfigError, OptimizerConfig
from zeroexp.cut.chunk import MATRIX
from zeroexp.cut.layout import LAYOUTS, Layout
from zeroexp.cut.moment_blocks import INT8, kind_in_blocks, kind_in_full
from zeroexp.registry import Later, Registry

if TYPE_CHECKING:
    import torch

# What our engine does with the parameters of a row, and no optimizer reads.
OF_ENGINE = ("layout", "master", "over")
ROW_KEYS = ("name", "lr", "weight_decay", "moments", "settings", *OF_ENGINE)  # of every row


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


def kind_of_matrices(row: str) -> str:
    """Return the kind of the groups of a row that are stepped as whole matrices."""
    return f"{row} {MATRIX}".strip()


def row_of_kind(kind: str) -> str:
    """Return the row of `optimizer.kinds` whose parameters a kind of groups has."""
    kind = kind_in_full(kind)
    return "" if kind == MATRIX else kind.removesuffix(f" {MATRIX}")


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
_make_by_kind = Later("zeroexp.training.optimizer_by_kind:OptimizerByKind")
_fused_is_right = Later("zeroexp.interface.fused_kernels:fused_is_right")


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

    kind, groups = torch.optim.SGD, list(groups)
    tensors = [p for each in groups for p in (each["params"] if isinstance(each, dict) else [each])]
    return kind(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=config.fused and all(_fused_is_right(kind, p, config.momentum) for p in tensors),
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
