"""Rules about strategy, implementation, precision and settings together."""

from __future__ import annotations

from zeroexp.check.refusal import refuse_combination
from zeroexp.config.engines import ENGINES
from zeroexp.config.families import MODELS
from zeroexp.config.keys import Config, StrategyConfig
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
        rows = "; ".join(f"{name} ({row})" for name, row in STAGES.items())
        refuse_combination(config, "strategy", f"no stage rests as {row}", f"use one of {rows}")
    if strategy.name in STAGES and stage != strategy.name:
        refuse_combination(config, "strategy", f"{row} is {stage}", f"use strategy={stage}")


def check_stages_of_engines(config: Config) -> None:
    """Require a stage that the native engine carries out, and what else it asks of a point."""
    strategy = config.strategy
    name = strategy.implementation
    if name not in ENGINES:
        return
    if _is_torch(strategy) and strategy.name == "zero1_allreduce":
        problem = "undefined with strategy.implementation=torch"
        remedy = "use zero1: torch's ZeRO-1 is this row (gradients rest replicated)"
        refuse_combination(config, "strategy", problem, remedy)
    engine = ENGINES[name]
    if strategy.name not in engine.stages:
        stages = ", ".join(engine.stages)
        refuse_combination(config, "strategy", f"{name} has no such stage", f"use one of {stages}")
    if engine.refuse is not None and (problem := engine.refuse(config)):
        refuse_combination(config, "strategy.implementation", problem, "use another implementation")


def check_precision(config: Config) -> None:
    mode = config.precision
    if mode.compute == "float32" and (mode.reduce, mode.master) != ("float32", "float32"):
        problem, remedy = f"narrower than {mode.reduce}, {mode.master}", "use precision=bf16_master"
        refuse_combination(config, "precision.compute", problem, remedy)
    if mode.autocast and mode.compute != "float32":
        problem, remedy = "parameters are fp32 there", "precision=autocast"
        refuse_combination(config, "precision.autocast", problem, remedy)
    if reason := _precision_without_engine(config):
        refuse_combination(config, "precision", *reason)


def _precision_without_engine(config: Config) -> tuple[str, str] | None:
    """Return why the engine has no such precision, and what to use; None where it has."""
    strategy, mode = config.strategy, config.precision
    name, dtypes = strategy.implementation, {mode.compute, mode.reduce, mode.master}
    if name in ENGINES and not ENGINES[name].mixes_dtypes:
        wrong = mode.autocast or dtypes != {"float32"}
        reason = f"strategy.implementation={name} computes in fp32 alone", "use precision=fp32"
    elif not _is_torch(strategy):
        wrong = mode.autocast
        reason = "our engine has no autocast", "use precision=bf16_master, its peer"
    elif _is_ddp(strategy):
        wrong = len(dtypes) > 1
        problem = f"torch's {strategy.name} keeps no master weights"
        reason = problem, "use precision=autocast, its peer"
    else:
        wrong = mode.autocast or mode.master != "float32"
        problem = f"torch's {strategy.name} (FSDP2) has fp32 shards and casts when it gathers"
        reason = problem, "use precision=bf16_master or fp32"
    return reason if wrong else None


def check_dtypes_of_engines(config: Config) -> None:
    """Require that a native engine's dtypes come from the precision group, the only one that it reads."""
    strategy, mode = config.strategy, config.precision
    wanted = {"parameters": mode.compute, "gradients": mode.reduce, "optimizer": mode.master}
    for kind, dtype in wanted.items():
        if strategy.implementation in ENGINES and getattr(strategy, kind).dtype != dtype:
            problem = f"no effect with strategy.implementation={strategy.implementation}"
            refuse_combination(config, f"strategy.{kind}.dtype", problem, "use the precision group")


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


def check_reduce_each(config: Config) -> None:
    strategy = config.strategy
    if strategy.gradients.placement == "partial" and strategy.reduce_each == "microbatch":
        problem = f"strategy={strategy.name} keeps gradients unreduced until the step"
        refuse_combination(config, "strategy.reduce_each", problem, "use step, or strategy=zero2")


def check_fused_sgd(config: Config) -> None:
    """Refuse torch's fused SGD on the shards of FSDP2, for which torch has no such kernel."""
    strategy, chosen = config.strategy, config.optimizer
    if _is_torch(strategy) and not _is_ddp(strategy) and chosen.name == "sgd" and chosen.fused:
        problem, remedy = "torch has no fused SGD for FSDP2's shards", "use optimizer.fused=false"
        refuse_combination(config, "optimizer.fused", problem, remedy)


def _is_torch(strategy: StrategyConfig) -> bool:
    return strategy.implementation == "torch"


def _is_ddp(strategy: StrategyConfig) -> bool:
    """Tell whether torch builds this stage on DistributedDataParallel; all others use FSDP2."""
    return strategy.name in ("ddp", "zero1")


def check_selective_recomputation(config: Config) -> None:
    if config.train.recompute_except and config.strategy.unit == "module":
        # torch counts each operator of forward and of the recomputation, and those of gathers differ.
        problem = (
            "strategy.unit=module gathers inside of recomputed blocks, whose operators torch counts"
        )
        refuse_combination(config, "train.recompute_except", problem, "use strategy.unit=block")


RULES = (
    *(check_stage_of_rows, check_stages_of_engines, check_precision, check_dtypes_of_engines),
    *(check_skipped_experts, check_reduce_each, check_fused_sgd, check_selective_recomputation),
)
