"""The registry of native engines: what `strategy.implementation` may name beside our layouts. No torch.

Our own engine is no entry here: each of its layouts is a word (`cut/layout.py`), and all share one engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroexp.config import deepspeed_settings
from zeroexp.config.keys import Config
from zeroexp.cut.stage import STAGES, Stage
from zeroexp.registry import Later, Registry


@dataclass(frozen=True)
class Engine:
    """One engine that is not ours.

    build: takes Config, BuiltModel, World and the words that all engines take (param_groups, optimizer_factory,
        max_grad_norm, values), and returns a Strategy (interface/strategy.py).
    stages: the words of `strategy` that it carries out.
    settings: its own keys below `strategy.settings`, with their defaults.
    keys: the keys of `strategy` that it reads beside those; every other one is refused.
    mixes_dtypes: whether it reads the group `precision`; without it, all but fp32 is refused.
    refuse: returns why a point has no meaning for it, or None.
    form: takes Config and BuiltModel and returns a closed form, as those in plan/torch_closed_forms.py; without one the
    engine can not be planned.
    rests: where its tensors rest, for stages under whose name it does something else; `labels` says what, in words.
    """

    build: Callable[..., Any]
    stages: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    keys: tuple[str, ...] = ()
    mixes_dtypes: bool = False
    refuse: Callable[[Config], str | None] | None = None
    form: Callable[..., Any] | None = None
    rests: Mapping[str, Stage] = field(default_factory=dict[str, Stage])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


ENGINES = Registry(
    "strategy.implementation",
    {
        "torch": Engine(
            build=Later("zeroexp.engines.build:build_torch_strategy"),
            stages=("ddp", "zero1", "zero2", "zero3"),
            keys=("unit", "replicas", "gradient_as_bucket_view"),
            mixes_dtypes=True,
            form=Later("zeroexp.plan.torch_closed_forms:form_of_torch"),
            rests={"zero1": STAGES["zero1_allreduce"], "zero2": STAGES["zero3"]},
            labels={
                "zero1": "DDP and ZeroRedundancyOptimizer: gradients rest replicated",
                "zero2": "FSDP2 without reshard: parameters rest sharded",
            },
        ),
        "deepspeed": Engine(
            build=Later("zeroexp.engines.deepspeed:build_deepspeed"),
            stages=("zero1", "zero2", "zero3"),
            settings=deepspeed_settings.SETTINGS,
            mixes_dtypes=True,
            refuse=deepspeed_settings.refuse,
            form=Later("zeroexp.plan.deepspeed_closed_form:form_of_deepspeed"),
            labels=deepspeed_settings.LABELS,
        ),
    },
    needs="an Engine(build=function, stages=(...))",
    fits=lambda value: isinstance(value, Engine),
    arguments=lambda engine: {"build": 4, "refuse": 1, "form": 2},
)


def stage_carried_out(implementation: str, stage: str) -> Stage | None:
    """Return where an engine's tensors rest under the name of a stage; None where that is not known."""
    rests = ENGINES[implementation].rests if implementation in ENGINES else {}
    return rests.get(stage) or STAGES.get(stage)


def label_of(implementation: str, stage: str, outer_every: int | None = None) -> str | None:
    """Return in words what an engine does under the name of a stage, where it is something else.

    outer_every: strategy.outer.every.
    """
    if outer_every is not None:
        steps = "step" if outer_every == 1 else f"{outer_every} steps"
        return f"{stage} whose replicas meet every {steps}, by design not equal to one process"
    return ENGINES[implementation].labels.get(stage) if implementation in ENGINES else None
