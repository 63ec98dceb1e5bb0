"""What is compared: name -> stage, bytes of theory and how to build it. Every engine has fused AdamW."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml
from torch import Tensor, nn

from benchmarks import peers, tunable
from zeroexp.config.keys import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerPlacement,
    ParametersPlacement,
    PrecisionConfig,
    StatePlacement,
    StrategyConfig,
)
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.cut.stage import STAGES
from zeroexp.engines.build import build_strategy
from zeroexp.engines.sharded import Sharded
from zeroexp.models.module import BuiltModel, build_model
from zeroexp.process.world import World
from zeroexp.zero.options import DTYPES, Dtypes, Options

SEQ_LEN = 128
CONF = Path(__file__).resolve().parent.parent / "conf" / "model"

# Smaller than the shipped ones: one million parameters, where latency is all there is.
MILLION = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}

PRECISIONS = {
    "fp32": PrecisionConfig(),
    "bf16_master": PrecisionConfig("bf16_master", compute="bfloat16"),
}


class Timed(Protocol):
    """The part of interface.strategy.Strategy that a timed step uses."""

    model: nn.Module

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]: ...
    def backward(self, loss: Tensor) -> None: ...
    def step(self, *, drain: bool = False) -> Tensor: ...
    def zero_grad(self) -> None: ...


Build = Callable[[Config, BuiltModel, World], Timed]


@dataclass(frozen=True)
class Engine:
    stage: str
    settings: dict[str, Any] | None = None  # of StrategyConfig; None: built by `build`
    build: Build = build_strategy
    # Bytes a rank must send in a step in units of parameter bytes x (N-1)/N. None: our collectives count them.
    theory: float | None = None

    @property
    def is_ours(self) -> bool:
        return self.theory is None


def _over_sockets(config: Config, model: BuiltModel, world: World) -> Timed:
    """Our engine as between hosts, although its ranks share one: with the transport its peers have."""
    precision = config.precision
    return Sharded(
        model.module,
        blocks=model.blocks,
        stage=STAGES[config.strategy.name],
        param_groups=parameter_groups(model.module, config.optimizer, model.blocks),
        optimizer_factory=optimizer_factory(config.optimizer),
        world=world,
        dtypes=Dtypes(
            *(DTYPES[d] for d in (precision.compute, precision.reduce, precision.master))
        ),
        max_grad_norm=config.optimizer.max_grad_norm,
        options=Options(transport="gloo"),
    )


def _ours(stage: str, implementation: str) -> Engine:
    return Engine(stage, {"implementation": implementation})


# DeepSpeed's buckets of 5M elements are 20 MB in float32, about DDP's. What its ZeRO-3 keeps gathered is its default.
OVERLAPPED = {"settings": {"overlap_comm": True}}
AS_IT_COMES = {
    "settings": {
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 5_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_reuse_distance": 1_000_000_000,
    }
}
ENGINES: dict[str, Engine] = {
    "limit": Engine("limit", build=peers.Limit, theory=0),
    "limit_copies": Engine("limit", build=peers.Copies, theory=0),
    "limit_copies3": Engine("limit", build=partial(peers.Copies, gathers=True), theory=0),
    "plain": Engine("plain", build=peers.Plain, theory=0),  # one rank only
    "ddp": Engine("ddp", {"implementation": "torch", "gradient_as_bucket_view": True}, theory=2),
    "ddp_master": Engine("ddp", build=peers.DdpWithMaster, theory=2),  # bf16_master alone
    "zero_redundancy": Engine(
        "zero1", {"implementation": "torch", "gradient_as_bucket_view": True}, theory=3
    ),
    "fsdp2_no_reshard": Engine("zero2", {"implementation": "torch"}, theory=2),
    "fsdp2": Engine("zero3", {"implementation": "torch"}, theory=3),
    "deepspeed2": Engine("zero2", {"implementation": "deepspeed"} | OVERLAPPED, theory=2),
    "deepspeed3": Engine("zero3", {"implementation": "deepspeed"} | AS_IT_COMES, theory=3),
    **{
        f"{stage}_{implementation}": _ours(stage, implementation)
        for implementation in ("buffer", "tensor", "parameter")
        for stage in ("ddp", "zero1", "zero2", "zero3")
        if implementation == "buffer" or stage != "ddp"
    },
    "zero3_buffer_keep_all": Engine(
        "zero3", {"implementation": "buffer", "keep": "all", "prefetch": 2}
    ),
    "zero1_buffer_sockets": Engine("zero1", {"implementation": "buffer"}, build=_over_sockets),
    "zero2_buffer_sockets": Engine("zero2", {"implementation": "buffer"}, build=_over_sockets),
    "zero3_buffer_sockets": Engine("zero3", {"implementation": "buffer"}, build=_over_sockets),
}


def _variant(peer: str, settings: dict[str, Any]) -> Engine:
    engine = ENGINES[peer]
    if peer in tunable.BUILD:
        return replace(engine, build=partial(tunable.BUILD[peer], settings))
    default = engine.settings or {}
    own = {**default.get("settings", {}), **settings}
    return replace(engine, settings={**default, "settings": own})


VARIANTS = {
    name: _variant(peer, settings)
    for peer in tunable.SETTINGS
    for name, settings in tunable.variants(peer).items()
}
ENGINES |= VARIANTS

# Compared where a comparison names them: what is kept from forward to backward pays on slow links alone.
ON_REQUEST = ("zero3_buffer_keep_all", "ddp_master", *VARIANTS)


def engines_for(world_size: int) -> list[str]:
    """Those that are installed and mean something at this world size."""
    missing = set() if find_spec("deepspeed") else {"deepspeed2", "deepspeed3"}
    return [
        name
        for name in ENGINES
        if name.partition("@")[0] not in missing | ({"plain"} if world_size > 1 else set())
    ]


def build_engine(
    name: str,
    model: ModelConfig,
    *,
    precision: str,
    world: World,
    clip: bool = False,
    compiled: bool = False,
) -> Timed:
    """The engine around a fresh model on the world's device; `compiled`: torch.compile of each block's forward."""
    engine = ENGINES[name]
    config = _config(engine, model, precision, clip)
    built = build_model(model, seed=0, device=world.device)
    if compiled:
        for block in map(built.module.get_submodule, built.blocks):
            block.forward = torch.compile(block.forward)
    return engine.build(config, built, world)


def model_config(name: str) -> ModelConfig:
    if name == "million":
        tiny = model_config("tiny")
        return replace(tiny, name=name, hf_config={**tiny.hf_config, **MILLION})
    return ModelConfig(**yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8")))


def parameter_bytes(model: str, precision: str) -> int:
    built = build_model(model_config(model), seed=0, device="meta")
    dtype = getattr(torch, PRECISIONS[precision].compute)
    return sum(parameter.numel() for parameter in built.module.parameters()) * dtype.itemsize


def _config(engine: Engine, model: ModelConfig, precision: str, clip: bool) -> Config:
    return Config(
        model=model,
        data=DataConfig(kind="synthetic", seq_len=SEQ_LEN),
        strategy=_strategy(engine, PRECISIONS[precision]),
        precision=PRECISIONS[precision],
        optimizer=OptimizerConfig(fused=True, max_grad_norm=1.0 if clip else None),
    )


def _strategy(engine: Engine, precision: PrecisionConfig) -> StrategyConfig:
    if engine.settings is None:
        return StrategyConfig()
    stage = STAGES[engine.stage]
    return StrategyConfig(
        name=engine.stage,
        parameters=ParametersPlacement(stage.parameters.value, precision.compute),
        gradients=StatePlacement(stage.gradients.value, precision.reduce),
        optimizer=OptimizerPlacement(stage.optimizer.value, precision.master),
        **engine.settings,
    )
