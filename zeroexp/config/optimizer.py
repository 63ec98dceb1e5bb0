"""The optimizer and its learning rate: parameter groups, a factory for rank-local optimizers, a schedule.

An engine decides which tensors it optimizes (whole parameters, slices, flat pieces), so it receives the groups of the
model and a factory, never a finished optimizer. The learning rate is a pure function of the step, so that a run
resumes without the state of a scheduler. OPTIMIZERS holds what `optimizer.name` may name; torch is imported only when
an optimizer is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zeroexp.config.keys import ConfigError, OptimizerConfig
from zeroexp.cut.chunk import MATRIX
from zeroexp.registry import Later, Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer.

    make: takes parameter groups as torch.optim does, and the OptimizerConfig, and returns the optimizer.
    num_moments: how many tensors of a weight's size it keeps for each weight, by which a plan counts its bytes.
    bytes_per_tensor: what it keeps beside them for each tensor.
    keys: the keys of `optimizer` that it reads beyond those that all read; other ones are refused.
    settings: its own keys below `optimizer.settings`, with their defaults.
    matrix_moments: how many such tensors it keeps of a block's matrix, where it steps these whole
    and in another way; nothing else. It then rounds moments to `config.moments` itself, and asks
    for whole matrices as interface/whole_matrices.py says. None: it steps all parameters alike.
    """

    make: Callable[[Iterable[Any], OptimizerConfig], torch.optim.Optimizer]
    num_moments: Callable[[OptimizerConfig], int]
    bytes_per_tensor: int = 0
    keys: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    matrix_moments: int | None = None


def parameter_groups(
    module: nn.Module, config: OptimizerConfig, blocks: Sequence[str]
) -> list[dict[str, Any]]:
    """Return one group with weight decay and one without, in the form torch.optim takes.

    Norms and biases, which have fewer than two dimensions, form the second group. Frozen parameters are in no group and
    a tied parameter appears once. If all parameters decay alike, there is one group. Where the optimizer steps matrices
    of the model's `blocks` in another way these come first, as a group with the kind `matrix`.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    matrices: list[nn.Parameter] = []
    if OPTIMIZERS[config.name].matrix_moments is not None:
        matrices = _matrices_of_blocks(module, blocks)
        if not matrices:
            problem = "no block of the model has a trainable matrix"
            raise ConfigError(f"optimizer.name={config.name}: {problem}; use optimizer=adamw")
    taken = set(matrices)
    others = [p for p in trainable if p not in taken]
    decayed, plain = [p for p in others if p.ndim >= 2], [p for p in others if p.ndim < 2]
    if config.decay_norms_and_biases or config.weight_decay == 0:
        decayed, plain = others, []
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay, "kind": MATRIX},
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _matrices_of_blocks(module: nn.Module, blocks: Sequence[str]) -> list[nn.Parameter]:
    """Return the trainable matrices inside of blocks; an embedding's rows are no matrix that maps, wherever it lies."""
    from torch import nn

    named = dict(module.named_modules())
    inside = [each for block in blocks for each in named[block].modules()]
    parameters = [
        parameter
        for each in inside
        if not isinstance(each, nn.Embedding)
        for parameter in each.parameters(recurse=False)
    ]
    return [p for p in dict.fromkeys(parameters) if p.ndim == 2 and p.requires_grad]


def optimizer_factory(
    config: OptimizerConfig,
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """Return a function that makes the configured optimizer over the groups or tensors an engine hands in."""
    kind = OPTIMIZERS[config.name]
    rounds_itself = kind.matrix_moments is not None
    make_kind = kind.make if config.moments is None or rounds_itself else _make_rounded

    def make(groups: Iterable[Any]) -> torch.optim.Optimizer:
        import torch

        made = make_kind(groups, config)
        if not isinstance(made, torch.optim.Optimizer):
            problem = f"its make returns a {type(made).__name__}"
            raise ConfigError(f"optimizer.name={config.name}: {problem}; return an optimizer")
        return made

    return make


_make_rounded = Later("zeroexp.training.rounded_moments:make_rounded")


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

    return torch.optim.SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=config.fused,
    )


OPTIMIZERS = Registry(
    "optimizer.name",
    "zeroexp.optimizers",
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
            num_moments=lambda config: 2,
            bytes_per_tensor=4,
            keys=("betas", "eps", "momentum"),
            settings={"nesterov": True, "ns_steps": 5, "adjust_lr": "match_rms_adamw"},
            matrix_moments=1,
        ),
    },
    needs="an OptimizerKind(make=function, num_moments=function)",
    fits=lambda value: isinstance(value, OptimizerKind),
    arguments=lambda kind: {"make": 2, "num_moments": 1},
)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the rate of the 0-based `step`: it rises linearly over `warmup_steps`, then follows the schedule.

    It reaches `lr` in the last warm-up step and `lr * min_lr_ratio` in the last step of the run.
    """
    if config.schedule not in SCHEDULES:
        raise ConfigError(f"optimizer.schedule={config.schedule}: use {', '.join(SCHEDULES)}")
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    first = max(config.warmup_steps - 1, 0)  # the step whose rate is `lr`
    progress = min((step - first) / max(total_steps - 1 - first, 1), 1.0)
    fall = progress if config.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return config.lr * (1 - (1 - config.min_lr_ratio) * fall)
