"""Rules about strategy, implementation, precision and settings together."""

from __future__ import annotations

from zeroexp.check.refusal import undefined, without_effect
from zeroexp.config import Config, StrategyConfig
from zeroexp.sharding.placement import STAGES

ENGINE_SETTINGS = ("overlap", "owners", "prefetch", "keep", "reduce_each", "bucket_mb")


def rows(config: Config) -> None:
    """Require that the three rows form a known stage, and the stage that the strategy's name promises."""
    strategy = config.strategy
    kinds = (strategy.parameters, strategy.gradients, strategy.optimizer)
    row = ",".join(kind.placement for kind in kinds)
    stage = {str(stage): name for name, stage in STAGES.items()}.get(row)
    if stage is None:
        known = "; ".join(f"{name} ({row})" for name, row in STAGES.items())
        undefined(config, "strategy", f"no stage rests as {row}", f"use one of {known}")
    if strategy.name in STAGES and stage != strategy.name:
        undefined(config, "strategy", f"{row} is {stage}", f"use strategy={stage}")


def stages_of_torch(config: Config) -> None:
    strategy = config.strategy
    if not _is_torch(strategy):
        return
    if strategy.name == "zero1_allreduce":
        remedy = "use zero1: torch's ZeRO-1 is this row (gradients rest replicated)"
        undefined(config, "strategy", "undefined with strategy.implementation=torch", remedy)
    if strategy.name not in STAGES:
        known = ", ".join(stage for stage in STAGES if stage != "zero1_allreduce")
        undefined(config, "strategy", "torch has no such stage", f"use one of {known}")


def precision(config: Config) -> None:
    strategy, mode = config.strategy, config.precision
    dtypes = (mode.compute, mode.reduce, mode.master)
    if mode.compute == "float32" and dtypes != ("float32",) * 3:
        remedy = "use precision=bf16_master"
        undefined(config, "precision.compute", f"narrower than {', '.join(dtypes[1:])}", remedy)
    if mode.autocast and mode.compute != "float32":
        undefined(config, "precision.autocast", "parameters are fp32 there", "precision=autocast")
    if not _is_torch(strategy):
        if mode.autocast:
            remedy = "use precision=bf16_master, its peer"
            undefined(config, "precision", "our engine has no autocast", remedy)
    elif _is_ddp(strategy):
        if len(set(dtypes)) > 1:
            problem = f"torch's {strategy.name} keeps no master weights"
            undefined(config, "precision", problem, "use precision=autocast, its peer")
    elif mode.autocast or mode.master != "float32":
        problem = f"torch's {strategy.name} (FSDP2) has fp32 shards and casts when it gathers"
        undefined(config, "precision", problem, "use precision=bf16_master or fp32")


def dtypes_of_torch(config: Config) -> None:
    """Require that a torch engine's dtypes come from the precision group, the only one that it reads."""
    strategy, mode = config.strategy, config.precision
    wanted = {"parameters": mode.compute, "gradients": mode.reduce, "optimizer": mode.master}
    for kind, dtype in wanted.items():
        if _is_torch(strategy) and getattr(strategy, kind).dtype != dtype:
            problem = "no effect with strategy.implementation=torch"
            undefined(config, f"strategy.{kind}.dtype", problem, "use the precision group")


def settings_of_torch(config: Config) -> None:
    strategy = config.strategy
    if not (_is_torch(strategy) and _is_ddp(strategy)):
        why = "only torch's DistributedDataParallel has it (ddp, zero1)"
        without_effect(config, "strategy.gradient_as_bucket_view", why)
    if not _is_torch(strategy):
        return
    for key in ENGINE_SETTINGS:
        without_effect(config, f"strategy.{key}", "torch's engines do not have it")
    if _is_ddp(strategy) or strategy.unit != "block":
        without_effect(config, "strategy.unit", "torch's FSDP2 wraps blocks, its DDP the model")


def skipped_experts(config: Config) -> None:
    """Refuse FSDP2 where ranks skip different experts: it reduces present gradients together, so sizes would differ."""
    strategy, family = config.strategy, config.model.family
    if _is_torch(strategy) and not _is_ddp(strategy) and family == "moe" and config.world_size > 1:
        problem = (
            f"FSDP2 ends in SIGABRT where ranks skip different experts of model.family={family}"
        )
        remedy = "use buffer, or model=mixtral_tiny, whose experts always have a gradient"
        undefined(config, "strategy.implementation", problem, remedy)


def settings_of_ours(config: Config) -> None:
    strategy = config.strategy
    if _is_torch(strategy):
        return
    name, layout = strategy.name, strategy.implementation
    if layout != "parameter":
        without_effect(config, "strategy.owners", f"{layout} cuts evenly, nothing has an owner")
    if strategy.optimizer.placement != "shard":
        without_effect(config, "strategy.owners", f"strategy={name} shards nothing")
    if strategy.parameters.placement != "shard":
        for key in ("prefetch", "keep"):
            without_effect(config, f"strategy.{key}", f"strategy={name} never gathers parameters")
    if strategy.overlap is False and strategy.prefetch:
        without_effect(config, "strategy.prefetch", "nothing is gathered ahead without overlap")


def reduce_each(config: Config) -> None:
    strategy = config.strategy
    if strategy.gradients.placement == "partial" and strategy.reduce_each == "microbatch":
        problem = f"strategy={strategy.name} keeps gradients unreduced until the step"
        undefined(config, "strategy.reduce_each", problem, "use step, or strategy=zero2")


def _is_torch(strategy: StrategyConfig) -> bool:
    return strategy.implementation == "torch"


def _is_ddp(strategy: StrategyConfig) -> bool:
    """Does torch build this stage on DistributedDataParallel? All others use FSDP2."""
    return strategy.name in ("ddp", "zero1")


RULES = (
    rows,
    stages_of_torch,
    precision,
    dtypes_of_torch,
    settings_of_torch,
    skipped_experts,
    settings_of_ours,
    reduce_each,
)
