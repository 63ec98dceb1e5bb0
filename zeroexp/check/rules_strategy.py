"""Rules about strategy, implementation, precision and settings together."""

from __future__ import annotations

from collections.abc import Iterator

from zeroexp.check.refusal import Refusal
from zeroexp.config.engines import ENGINES
from zeroexp.config.families import MODELS
from zeroexp.config.keys import TORCH_DDP, Config, StrategyConfig
from zeroexp.config.optimizer import OPTIMIZERS, master_of_kind, rows_of
from zeroexp.cut.engine_rules import problems
from zeroexp.cut.moment_blocks import INT8, MOST_DECAY
from zeroexp.cut.stage import STAGES, Stage

# Engines of others whose optimizers step whole parameters.
WHOLE_ON_A_RANK = {("torch", stage) for stage in TORCH_DDP}
# Settings of the engine whose key has another name.
OTHER_KEYS = {
    "optimizer_over": "strategy.optimizer.over",
    "masters_rest": "strategy.parameters.dtype",
    "outer": "strategy.outer.every",
}


def check_stage_of_rows(config: Config) -> Iterator[Refusal]:
    """Require that the three rows form a known stage, and the stage that the strategy's name promises."""
    strategy = config.strategy
    row = ",".join(row.placement for row in strategy.rows)
    if strategy.name in STAGES and str(STAGES[strategy.name]) == row:
        return
    stage = {str(stage): name for name, stage in STAGES.items()}.get(row)
    if stage is None:
        rows = "; ".join(f"{name} ({row})" for name, row in STAGES.items())
        yield "strategy", f"no stage rests as {row}", f"use one of {rows}"
    if strategy.name in STAGES and stage != strategy.name:
        yield "strategy", f"{row} is {stage}", f"use strategy={stage}"


def check_stages_of_engines(config: Config) -> Iterator[Refusal]:
    """Require a stage that the native engine carries out, and what else it asks of a point."""
    strategy, name = config.strategy, config.strategy.implementation
    if name not in ENGINES:
        return
    if name == "torch" and strategy.name == "zero1_allreduce":
        remedy = "use zero1: torch's ZeRO-1 is this row (gradients rest replicated)"
        yield "strategy", "undefined with strategy.implementation=torch", remedy
    engine = ENGINES[name]
    if strategy.name not in engine.stages:
        yield "strategy", f"{name} has no such stage", f"use one of {', '.join(engine.stages)}"
    if engine.refuse is not None and (problem := engine.refuse(config)):
        yield "strategy.implementation", problem, "use another implementation"


def check_precision(config: Config) -> Iterator[Refusal]:
    mode = config.precision
    for key in ("reduce", "master"):
        if mode.compute == "float32" and getattr(mode, key) != "float32":
            problem = "narrower than precision.compute=float32"
            yield f"precision.{key}", problem, "use float32, or precision=bf16_master"
    if mode.autocast and mode.compute != "float32":
        problem = f"keeps parameters in float32, not in precision.compute={mode.compute}"
        yield "precision.autocast", problem, "use precision=autocast for both"


def check_precision_of_engines(config: Config) -> Iterator[Refusal]:
    strategy, mode = config.strategy, config.precision
    name, dtypes = strategy.implementation, {mode.compute, mode.reduce, mode.master}
    if name in ENGINES and not ENGINES[name].mixes_dtypes:
        wrong = mode.autocast or dtypes != {"float32"}
        problem, remedy = f"strategy.implementation={name} computes in fp32 alone", "fp32"
    elif name != "torch":
        wrong, problem = mode.autocast, "our engine has no autocast"
        remedy = "bf16_master, its peer"
    elif not _is_fsdp2(strategy):
        wrong, problem = len(dtypes) > 1, f"torch's {strategy.name} keeps no master weights"
        remedy = "autocast, its peer"
    else:
        wrong = mode.autocast or mode.master != "float32"
        problem = f"torch's {strategy.name} (FSDP2) has fp32 shards and casts when it gathers"
        remedy = "bf16_master or fp32"
    if wrong:
        yield "precision", problem, f"use precision={remedy}"


def check_float16(config: Config) -> Iterator[Refusal]:
    """Require that what is float16 overflows in no sum, and that all ranks find one loss scale."""
    strategy, mode = config.strategy, config.precision
    rows = (strategy.parameters, strategy.gradients, strategy.optimizer)
    dtypes = [mode.compute, *(row.dtype for row in rows)]
    if strategy.masters_rest:  # and become what computes
        dtypes[1] = mode.compute
    if "float16" not in dtypes:
        return
    trains = ("float16", "float16", "float32", "float32")
    rows_of = (f"strategy.{name}.dtype" for name in ("parameters", "gradients", "optimizer"))
    wrong = [
        (key, dtype)
        for key, dtype, right in zip(("precision.compute", *rows_of), dtypes, trains, strict=True)
        if dtype != right
    ]
    if wrong:
        key, _ = next((each for each in wrong if each[1] == "float16"), wrong[0])
        problem = "in float16 sums overflow and small updates are lost"
        yield key, problem, "use precision=fp16_master, and let it set all dtypes"
    if strategy.implementation in ENGINES and not _is_fsdp2(strategy):
        yield "precision.compute", "only ours and FSDP2 scale the loss", "use another precision"
    if strategy.outer.every is not None:
        problem = "replicas would find a loss scale each"
        yield "strategy.outer.every", problem, "use precision=bf16_master"
    if strategy.reduce_codec is not None:
        problem = "has no code for inf, by which float16 finds its loss scale"
        yield "strategy.reduce_codec", problem, "leave it null"


def check_dtypes_of_engines(config: Config) -> Iterator[Refusal]:
    """Require that a native engine's dtypes come from the precision group, the only one that it reads."""
    strategy, mode = config.strategy, config.precision
    dtypes = {"parameters": mode.compute, "gradients": mode.reduce, "optimizer": mode.master}
    for kind, dtype in dtypes.items():
        if strategy.implementation in ENGINES and getattr(strategy, kind).dtype != dtype:
            problem = f"no effect with strategy.implementation={strategy.implementation}"
            yield f"strategy.{kind}.dtype", problem, "use the precision group"


def check_fsdp2(config: Config) -> Iterator[Refusal]:
    """Refuse what torch's FSDP2 fails at: it reduces present gradients together, so their sizes must not differ."""
    family = config.model.family
    if not _is_fsdp2(config.strategy):
        return
    if MODELS[family].skips_modules and config.world_size > 1:
        problem = f"ends in SIGABRT where ranks skip different experts of model.family={family}"
        remedy = "use buffer, or model=mixtral_tiny, whose experts always have a gradient"
        yield "strategy.implementation", f"FSDP2 {problem}", remedy


def check_whole_matrices(config: Config) -> Iterator[Refusal]:
    """Refuse FSDP2, which cuts matrices, and hosts for an optimizer that steps them whole; ours bring them together."""
    strategy, rows = config.strategy, rows_of(config.optimizer).values()
    for name in sorted({own.name for own in rows if OPTIMIZERS[own.name].whole_matrices}):
        if _is_fsdp2(strategy):
            cuts = f"{strategy.implementation} cuts the matrices that"
            problem = f"{cuts} optimizer.name={name} steps whole"
            yield "strategy.implementation", problem, "use buffer, which brings them together"
        if strategy.offload:
            problem = f"optimizer.name={name} multiplies matrices, for which a host takes too long"
            yield "strategy.offload", problem, "leave it null"


def check_moments(config: Config) -> Iterator[Refusal]:
    """Refuse narrow moments where they would be as before, would never get smaller, or lie in blocks that are cut.

    A number of 8 bits that is multiplied by 1 - 2**-8 or more may be rounded to itself, and so is a code of 8 bits that
    does not come half-way to the next.
    """
    for row, chosen in rows_of(config.optimizer).items():
        group = f"optimizer.kinds.{row}" if row else "optimizer"
        key = f"{group}.moments={chosen.moments}"
        if chosen.moments is None:
            continue
        if chosen.moments == (master_of_kind(config.optimizer, row) or config.precision.master):
            yield key, f"no effect, master weights are {chosen.moments} too", "leave it null"
        if OPTIMIZERS[chosen.name].num_moments(chosen) == 0:
            yield key, f"no effect, {chosen.name} keeps none", "leave it null"
        read = OPTIMIZERS[chosen.name].keys
        decays = {"betas": max(chosen.betas), "momentum": chosen.momentum}
        most = MOST_DECAY[chosen.moments]
        for name in (name for name in decays if name in read and decays[name] >= most):
            problem = f"rounding takes back what {group}.{name} lets a moment fall in a step"
            yield key, problem, f"use less than {most:.3f} in {group}.{name}, or leave it null"
        name, stage = config.strategy.implementation, config.strategy.name
        if chosen.moments == INT8 and name in ENGINES and (name, stage) not in WHOLE_ON_A_RANK:
            problem = f"{name} cuts parameters anywhere, also in blocks that share a scale"
            yield key, problem, "use bfloat16, or strategy.implementation=buffer"


def check_engine(config: Config) -> Iterator[Refusal]:
    """Require what our engine carries out, and replicas that form groups under any."""
    strategy = config.strategy
    stage = Stage.of(*(row.placement for row in strategy.rows))
    for key, problem, remedy in problems(
        strategy, stage, config.world_size, codes=strategy.codes, group="strategy."
    ):
        if key == "replicas" or strategy.implementation not in ENGINES:
            yield OTHER_KEYS.get(key, f"strategy.{key}"), problem, remedy
    if (strategy.implementation, strategy.name) in WHOLE_ON_A_RANK and config.grid.num_groups > 1:
        problem = "ZeroRedundancyOptimizer shards over all ranks"
        yield "strategy.replicas", problem, "use zero2 or zero3, which are FSDP2"


def check_secondary_partition(config: Config) -> Iterator[Refusal]:
    """Require gathers that such groups would save; what nodes they need is in rules_machine.py."""
    strategy, key, data = config.strategy, "strategy.secondary_partition", config.data
    if strategy.secondary_partition is None:
        return
    if _is_fsdp2(strategy):
        problem = "FSDP2 has its own, fully_shard(reshard_after_forward=ranks of a node)"
        yield key, f"{problem}, and no key sets it", "use buffer, or leave it out"
    once = data.global_batch_size == data.micro_batch_size * config.world_size
    if strategy.implementation not in ENGINES and strategy.keep == "all" and once:
        yield key, "strategy.keep=all gathers each unit once a step", "use keep=last"


def check_masters_at_rest(config: Config) -> Iterator[Refusal]:
    """Require that masters or codes at rest are other than the parameters, and what is sent."""
    strategy, key = config.strategy, "strategy.parameters.dtype"
    if not strategy.masters_rest or strategy.implementation in ENGINES:
        return
    if strategy.codes is None:
        if config.precision.compute == strategy.optimizer.dtype:
            remedy = "use precision=bf16_master, or leave it out"
            yield key, "parameters are the masters anyway", remedy
        return
    if config.model.lora.r is not None:
        problem = "adapters freeze weights, which have no master: they would rest beside codes"
        yield key, problem, "use strategy.gather_codec"
    if strategy.gather_codec is not None:
        problem = f"gathers send the codes of {key}={strategy.codes} as they rest"
        yield "strategy.gather_codec", problem, "leave it null"


def check_outer(config: Config) -> Iterator[Refusal]:
    """Require that all which needs one model comes after an outer step."""
    strategy, train, every = config.strategy, config.train, config.strategy.outer.every
    if every is None:
        return
    if strategy.outer.momentum >= 1:
        yield "strategy.outer.momentum", "a change would never fade", "use 0.9"
    lasts = {
        "train.steps": train.warmup_steps + train.steps,
        "train.validate_every": train.validate_every,
        "checkpoint.every": config.checkpoint.every,
    }
    for key, last in lasts.items():
        if last is not None and last % every:
            steps = f"{last} steps with its warm-up" if key == "train.steps" else f"{last} steps"
            problem = f"{steps} end between outer steps, where replicas differ"
            remedy = f"use a multiple of strategy.outer.every={every}"
            yield key, problem, remedy if key != "train.steps" else f"{remedy} in all"


def check_whole_blocks(config: Config) -> Iterator[Refusal]:
    """Refuse what takes a block as one piece of code where hooks gather inside of it, or code of its own saves."""
    train, strategy = config.train, config.strategy
    by_module, deepspeed = strategy.unit == "module", strategy.implementation == "deepspeed"
    inside = f"{'deepspeed' if deepspeed else 'strategy.unit=module'} gathers inside of blocks"
    remedy = (
        "use strategy.implementation=buffer or torch" if deepspeed else "use strategy.unit=block"
    )
    if train.recompute_except and by_module:  # torch counts those of gathers too
        yield "train.recompute_except", f"{inside}, whose operators torch counts", remedy
    if train.compile and (by_module or deepspeed):
        yield "train.compile", f"{inside}, where no graph goes on", remedy
    if train.offload_activations and train.compile:
        problem = "compiled blocks save in code of their own"
        yield "train.offload_activations", problem, "use train.compile=false"
    if train.offload_activations and config.precision.autocast:
        problem = "autocast saves casts of weights, which would be copied to the host too"
        yield "train.offload_activations", problem, "use precision=bf16 or fp32"
    if train.offload_activations and deepspeed:
        problem = f"{inside}, whose weights would be copied to the host too"
        yield "train.offload_activations", problem, remedy


def check_quantized(config: Config) -> Iterator[Refusal]:
    """Require that nothing casts or rounds what lies packed in floats."""
    strategy, key = config.strategy, f"model.lora.quantize={config.model.lora.quantize}"
    if config.model.lora.quantize is None:
        return
    mode = config.precision
    dtypes = {mode.compute, mode.reduce, mode.master, *(row.dtype for row in strategy.rows)}
    if dtypes != {"float32"} or mode.autocast:
        yield "precision", f"casts weights, and those of {key} are packed", "use precision=fp32"
    if strategy.gather_codec is not None:
        problem = f"rounds weights, and those of {key} are packed"
        yield "strategy.gather_codec", problem, "leave it out"
    if strategy.implementation in ENGINES and strategy.implementation != "torch":
        yield "strategy.implementation", f"not tried with {key}", "use buffer or torch"


def _is_fsdp2(strategy: StrategyConfig) -> bool:
    """Tell whether torch builds this stage on FSDP2; its others are built on DistributedDataParallel."""
    return strategy.implementation == "torch" and strategy.name not in TORCH_DDP
