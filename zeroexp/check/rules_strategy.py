"""Rules about strategy, implementation, precision and settings together."""

from __future__ import annotations

from zeroexp.check.refusal import refuse_combination, refuse_without_effect
from zeroexp.config.engines import ENGINES
from zeroexp.config.families import MODELS
from zeroexp.config.keys import ENGINE_SETTINGS, Config, StrategyConfig
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.stage import STAGES


def check_stage_of_rows(config: Config) -> None:
    """Require that the three rows form a known stage, and the stage that the strategy's name promises."""
    strategy = config.strategy
    kinds = (strategy.parameters, strategy.gradients, strategy.optimizer)
    row = ",".join(kind.placement for kind in kinds)
    if strategy.name in STAGES and str(STAGES[strategy.name]) == row:
        return
    stage = {str(stage): name for name, stage in STAGES.items()}.get(row)
    if stage is None:
        known = "; ".join(f"{name} ({row})" for name, row in STAGES.items())
        refuse_combination(config, "strategy", f"no stage rests as {row}", f"use one of {known}")
    if strategy.name in STAGES and stage != strategy.name:
        refuse_combination(config, "strategy", f"{row} is {stage}", f"use strategy={stage}")


def check_stages_of_engines(config: Config) -> None:
    """Require a stage that the native engine carries out, and what else it asks of a point."""
    strategy = config.strategy
    name = strategy.implementation
    if name not in ENGINES:
        return
    if _is_torch(strategy) and strategy.name == "zero1_allreduce":
        remedy = "use zero1: torch's ZeRO-1 is this row (gradients rest replicated)"
        refuse_combination(
            config, "strategy", "undefined with strategy.implementation=torch", remedy
        )
    engine = ENGINES[name]
    if strategy.name not in engine.stages:
        known = ", ".join(engine.stages)
        refuse_combination(config, "strategy", f"{name} has no such stage", f"use one of {known}")
    if engine.refuse is not None and (problem := engine.refuse(config)):
        refuse_combination(config, "strategy.implementation", problem, "use another implementation")


def check_precision(config: Config) -> None:
    strategy, mode = config.strategy, config.precision
    dtypes = (mode.compute, mode.reduce, mode.master)
    if mode.compute == "float32" and dtypes != ("float32",) * 3:
        remedy = "use precision=bf16_master"
        refuse_combination(
            config, "precision.compute", f"narrower than {', '.join(dtypes[1:])}", remedy
        )
    if mode.autocast and mode.compute != "float32":
        refuse_combination(
            config, "precision.autocast", "parameters are fp32 there", "precision=autocast"
        )
    if strategy.implementation in ENGINES and not ENGINES[strategy.implementation].mixes_dtypes:
        if mode.autocast or set(dtypes) != {"float32"}:
            problem = f"strategy.implementation={strategy.implementation} computes in fp32 alone"
            refuse_combination(config, "precision", problem, "use precision=fp32")
    elif not _is_torch(strategy):
        if mode.autocast:
            remedy = "use precision=bf16_master, its peer"
            refuse_combination(config, "precision", "our engine has no autocast", remedy)
    elif _is_ddp(strategy):
        if len(set(dtypes)) > 1:
            problem = f"torch's {strategy.name} keeps no master weights"
            refuse_combination(config, "precision", problem, "use precision=autocast, its peer")
    elif mode.autocast or mode.master != "float32":
        problem = f"torch's {strategy.name} (FSDP2) has fp32 shards and casts when it gathers"
        refuse_combination(config, "precision", problem, "use precision=bf16_master or fp32")


def check_dtypes_of_engines(config: Config) -> None:
    """Require that a native engine's dtypes come from the precision group, the only one that it reads."""
    strategy, mode = config.strategy, config.precision
    wanted = {"parameters": mode.compute, "gradients": mode.reduce, "optimizer": mode.master}
    for kind, dtype in wanted.items():
        if strategy.implementation in ENGINES and getattr(strategy, kind).dtype != dtype:
            problem = f"no effect with strategy.implementation={strategy.implementation}"
            refuse_combination(config, f"strategy.{kind}.dtype", problem, "use the precision group")


def check_settings_of_engines(config: Config) -> None:
    strategy = config.strategy
    name = strategy.implementation
    read = ENGINES[name].keys if name in ENGINES else ()
    if "gradient_as_bucket_view" not in read or (_is_torch(strategy) and not _is_ddp(strategy)):
        why = "only torch's DistributedDataParallel has it (ddp, zero1)"
        refuse_without_effect(config, "strategy.gradient_as_bucket_view", why)
    if name not in ENGINES:
        return
    for key in ENGINE_SETTINGS:
        if key not in read:
            refuse_without_effect(config, f"strategy.{key}", f"{name}'s engines do not have it")
    if _is_torch(strategy) and (_is_ddp(strategy) or strategy.unit != "block"):
        refuse_without_effect(
            config, "strategy.unit", "torch's FSDP2 wraps blocks, its DDP the model"
        )


def check_skipped_experts(config: Config) -> None:
    """Refuse FSDP2 where ranks skip different experts: it reduces present gradients together, so sizes would differ."""
    strategy, family = config.strategy, config.model.family
    skips = MODELS[family].skips_modules and config.world_size > 1
    if _is_torch(strategy) and not _is_ddp(strategy) and skips:
        problem = (
            f"FSDP2 ends in SIGABRT where ranks skip different experts of model.family={family}"
        )
        remedy = "use buffer, or model=mixtral_tiny, whose experts always have a gradient"
        refuse_combination(config, "strategy.implementation", problem, remedy)


def check_settings_of_ours(config: Config) -> None:
    strategy = config.strategy
    if strategy.implementation not in LAYOUTS:
        return
    name, layout = strategy.name, strategy.implementation
    if not LAYOUTS[layout].has_owners:
        refuse_without_effect(
            config, "strategy.owners", f"{layout} cuts evenly, nothing has an owner"
        )
    if strategy.optimizer.placement != "shard":
        refuse_without_effect(config, "strategy.owners", f"strategy={name} shards nothing")
    if strategy.parameters.placement != "shard":
        for key in ("prefetch", "keep"):
            refuse_without_effect(
                config, f"strategy.{key}", f"strategy={name} never gathers parameters"
            )
    if strategy.overlap is False and strategy.prefetch:
        refuse_without_effect(
            config, "strategy.prefetch", "nothing is gathered ahead without overlap"
        )


def check_reduce_each(config: Config) -> None:
    strategy = config.strategy
    if strategy.gradients.placement == "partial" and strategy.reduce_each == "microbatch":
        problem = f"strategy={strategy.name} keeps gradients unreduced until the step"
        refuse_combination(config, "strategy.reduce_each", problem, "use step, or strategy=zero2")


def _is_torch(strategy: StrategyConfig) -> bool:
    return strategy.implementation == "torch"


def _is_ddp(strategy: StrategyConfig) -> bool:
    """Tell whether torch builds this stage on DistributedDataParallel; all others use FSDP2."""
    return strategy.name in ("ddp", "zero1")


RULES = (
    check_stage_of_rows,
    check_stages_of_engines,
    check_precision,
    check_dtypes_of_engines,
    check_settings_of_engines,
    check_skipped_experts,
    check_settings_of_ours,
    check_reduce_each,
)
