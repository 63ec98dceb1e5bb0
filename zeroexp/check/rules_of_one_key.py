"""Rules about one key at a time. Breaking one ends a sweep.

Choices and bounds stand beside the keys themselves, in config/keys.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from zeroexp.check.refusal import Refusal, as_typed, value_of
from zeroexp.config.keys import KEYS, Config, StrategyConfig
from zeroexp.config.optimizer import OF_ENGINE, OPTIMIZERS, ROW_KEYS, OptimizerKind, rows_of
from zeroexp.config.parameter_kinds import KINDS, is_pattern
from zeroexp.config.plugins import REGISTRIES
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.stage import why_not_over_all
from zeroexp.process.ports import parse_port_range
from zeroexp.registry.did_you_mean import suggest_nearest, suggest_word

# What study.must_equal may name beside keys and groups of the config.
RUN_FACTS = ("machine", "versions", "git", "engine", "transport", "load")

MOST_RANKS = 1 << 24
# Whole numbers in a model's shape, which the key's last part names; a larger model would be built for minutes.
MOST_OF_SHAPE = {
    **{"num_hidden_layers": 1000, "n_layer": 1000, "depth": 1000},
    **{"num_experts": 256, "num_local_experts": 256},
}
MOST_OF_ANY = (1 << 31) - 1
MOST_MODULES = 10_000  # experts of all layers

MASTERS = ("float32", "bfloat16")  # of a row of optimizer.kinds
OVERS = ("group", "all")

# The name of a folder contains no path separator, and file systems accept it.
NAME = re.compile(r"[\w][\w .+-]{0,99}")
SLURM_NAME = re.compile(r"\w[\w.,+@:-]{0,199}")
SLURM_FEATURES = re.compile(r"[\w(\[][\w.,+@:*&|()\[\]!-]{0,199}")  # man sbatch, --constraint
LINK_SPEED = re.compile(r"[1-9]\d{0,2}[mg]bit")  # man tc, RATES
SBATCH_OPTION = re.compile(r"[a-zA-Z][\w-]*")


def check_all_given(config: Config) -> Iterator[Refusal]:
    """Require that no value is missing and no number is nan or infinite, because comparisons would accept those.

    A published model may hold any: Mamba's time steps have infinity as their limit.
    """
    for key, value in _values(asdict(config)):
        if value == "???":
            yield key, "no value", "give it one"
        published = key.startswith("model.published.")
        if isinstance(value, float) and not math.isfinite(value) and not published:
            remedy = "use a finite one, or null where that is allowed"
            yield f"{key}={value}", "no finite number", remedy


def _values(tree: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _values(value, f"{parent}.{key}" if parent else str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from _values(value, parent)
    else:
        yield parent, tree


def check_names(config: Config) -> Iterator[Refusal]:
    """Require valid names for folders and for objects in MLflow."""
    groups = ("model", "data", "strategy", "cluster", "precision", "optimizer", "tracking", "study")
    for key in (*(f"{group}.name" for group in groups), "tracking.experiment"):
        if (value := value_of(config, key)) is not None and not NAME.fullmatch(value):
            remedy = "use letters, digits, spaces and . _ + -, at most 100 in all"
            shown = value if len(value) <= 100 else f"{value[:20]}..."
            yield f"{key}={shown}", "no name", remedy
    if not config.outputs:
        yield "outputs", "no folder", "use outputs=outputs"
    if config.outputs.startswith("~") or "$" in config.outputs:
        problem = "would be a folder of that name here: no shell has replaced its ~ or $"
        yield f"outputs={config.outputs}", problem, "use outputs=$HOME/..."


def check_lists(config: Config) -> Iterator[Refusal]:
    """Require plain lists, since OmegaConf takes a list in a list for a word."""
    for key, item in KEYS.items():
        if str(item.type).startswith(("list[str]", "list[Any]")):
            value = value_of(config, key)
            if any(each is None or isinstance(each, list | dict) for each in value or ()):
                yield f"{key}={value}", "no list of words", "use one such as [a,b]"


def choices_of_keys() -> dict[str, list[str]]:
    """Return what each key may be, registered names too.

    A strategy's name may also be anything of a file of one's own.
    """
    open_keys = REGISTRIES.keys() - {"strategy.name"}
    return {
        **{
            key: [*item.metadata["choices"]]
            for key, item in KEYS.items()
            if item.metadata.get("choices")
        },
        **{key: [name for names in REGISTRIES[key] for name in names] for key in sorted(open_keys)},
    }


def check_choices(config: Config) -> Iterator[Refusal]:
    choices_of = choices_of_keys()
    # The dtypes of a strategy follow those of the precision, which the user wrote.
    for key in sorted(choices_of, key=lambda key: key.startswith("strategy.")):
        value, choices = value_of(config, key), choices_of[key]
        if value not in choices and (value is not None or KEYS[key].default is not None):
            yield key, "unknown word", suggest_word(key, value, choices)
    for key, registries in REGISTRIES.items():
        for registry in registries:
            registry.get(value_of(config, key))


def check_bounds(config: Config) -> Iterator[Refusal]:
    for key, item in KEYS.items():
        if (value := value_of(config, key)) is not None:
            for problem, remedy in _out_of_bounds(value, item.metadata):
                yield key, problem, remedy


def _out_of_bounds(value: float, bounds: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if (least := bounds.get("least")) is not None and value < least:
        yield "too small", f"use at least {least}"
    if (above := bounds.get("above")) is not None and value <= above:
        yield "too small", f"use more than {above}"
    if (most := bounds.get("most")) is not None and value > most:
        yield "too large", f"use at most {most}"


def check_shapes(config: Config) -> Iterator[Refusal]:
    for name in ("hf_config", "mlp", "moe", "settings"):
        for key, value in _values(getattr(config.model, name), f"model.{name}"):
            most: int = MOST_OF_SHAPE.get(key.rpartition(".")[2], MOST_OF_ANY)
            if isinstance(value, int) and not -most <= value <= most:
                yield f"{key}={value}", "too large", f"use at most {most}"
    depth, experts = config.model.moe.get("depth"), config.model.moe.get("num_experts")
    if isinstance(depth, int) and isinstance(experts, int) and depth * experts > MOST_MODULES:
        problem = f"too many with model.moe.depth={depth}"
        yield "model.moe.num_experts", problem, f"use at most {MOST_MODULES // depth}"


def check_betas(config: Config) -> Iterator[Refusal]:
    values = config.optimizer.betas
    if len(values) != 2 or not all(0 <= beta < 1 for beta in values):
        yield "optimizer.betas", "not two numbers in [0, 1)", "use [0.9, 0.95]"


def check_momentum(config: Config) -> Iterator[Refusal]:
    """Require what Muon orthogonalizes: without momentum it is no Muon, and a momentum of 1 never moves."""
    if config.optimizer.name == "muon" and not 0 < config.optimizer.momentum < 1:
        yield (
            "optimizer.momentum",
            "Muon needs one between 0 and 1",
            "use 0.95, as optimizer=muon does",
        )


def check_kinds(config: Config) -> Iterator[Refusal]:
    """Require rows of kinds or patterns, of settings that the optimizer of the row reads, within their bounds."""
    for row, own in config.optimizer.kinds.items():
        key = f"optimizer.kinds.{row}"
        if row not in KINDS and not is_pattern(str(row)):
            yield key, "no kind of parameters, and no pattern", suggest_nearest(row, KINDS)
        elif not isinstance(own, dict) or not own:
            yield f"{key}={own}", "no settings", "use some such as {lr: 1e-4}"
        else:
            yield from _check_row(config, row, own)


def _check_row(config: Config, row: str, own: dict[str, Any]) -> Iterator[Refusal]:
    name = own.get("name", config.optimizer.name)
    if name not in OPTIMIZERS:
        yield (
            f"optimizer.kinds.{row}.name={name}",
            "unknown word",
            suggest_nearest(name, OPTIMIZERS),
        )
        return
    kind = OPTIMIZERS[name]
    read = (*ROW_KEYS, *kind.keys)
    for key, value in own.items():
        named = f"optimizer.kinds.{row}.{key}={value}"
        if key not in read:
            problem = f"a row of optimizer.name={name} reads no such key"
            yield named, problem, suggest_nearest(key, read)
        of_engine = _wrong_for_engine(config, key, value) if key in OF_ENGINE else ()
        for problem, remedy in (*of_engine, *_wrong_in_row(key, value, kind)):
            yield named, problem, remedy
    chosen = replace(config, optimizer=rows_of(config.optimizer)[row])
    for rule in (check_betas, check_momentum):
        for key, problem, remedy in rule(chosen):
            in_row = f"optimizer.kinds.{row}.{key.removeprefix('optimizer.')}"
            yield f"{in_row}={value_of(chosen, key)}", problem, remedy


def _wrong_for_engine(config: Config, key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with what a row tells the engine of its layout, master weights and ranks."""
    strategy = config.strategy
    if strategy.implementation not in LAYOUTS:
        does = {
            "layout": "cuts all parameters alike",
            "master": "updates all in one dtype",
            "over": "shards the states of all parameters over the same ranks",
        }[key]
        remedy = "leave it out, or use strategy.implementation=buffer"
        yield f"{strategy.implementation} {does}", remedy
    elif key == "over":
        yield from _wrong_over(strategy, value)
    elif key == "master":
        yield from _wrong_master(config, value)


def _wrong_over(strategy: StrategyConfig, value: Any) -> Iterator[tuple[str, str]]:
    if value not in OVERS:
        yield "unknown word", f"use {' or '.join(OVERS)}"
    elif value == strategy.optimizer.over:
        yield f"no effect, strategy.optimizer.over={value} is for all parameters", "leave it out"
    elif value == "all" and (problem := why_no_optimizer_over_all(strategy)):
        yield problem


def why_no_optimizer_over_all(strategy: StrategyConfig) -> tuple[str, str] | None:
    """Return why there are not several groups that take each step together, and what to do."""
    differ, codes = strategy.outer.every is not None, strategy.codes is not None
    return why_not_over_all(
        strategy.replicas or 1, differ=differ, offload=strategy.offload, codes_rest=codes
    )


def _wrong_master(config: Config, value: Any) -> Iterator[tuple[str, str]]:
    precision, strategy = config.precision, config.strategy
    if value not in MASTERS:
        yield "unknown word", f"use {' or '.join(MASTERS)}"
    elif value == precision.master:
        yield f"no effect, master weights are {value} anyway", "leave it out"
    elif "float16" in (precision.compute, precision.master) or precision.compute == "float32":
        yield f"parameters are {precision.compute}", "use precision=bf16_master or bf16"
    taken = {
        "offload": strategy.offload,
        "parameters.dtype": strategy.codes,
        "outer": strategy.outer.every,
    }
    for key in (key for key, word in taken.items() if word):
        yield f"strategy.{key} takes all master weights in one dtype", "leave one of the two out"


def _wrong_in_row(key: str, value: Any, kind: OptimizerKind) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a value, whose type nobody has checked."""
    if key == "betas" and not isinstance(value, list):
        yield "not two numbers in [0, 1)", "use [0.9, 0.95]"
    if key == "moments" and value not in (
        None,
        *(words := KEYS["optimizer.moments"].metadata["choices"]),
    ):
        yield "unknown word", f"use null or {', '.join(words)}"
    if key == "layout" and str(value) not in LAYOUTS:
        yield "unknown word", suggest_nearest(str(value), LAYOUTS)
    if key == "settings":
        for word in value if isinstance(value, dict) else [value]:
            if word not in kind.settings:
                yield f"no such setting as {word}", suggest_nearest(word, kind.settings)
    if key in ("lr", "weight_decay", "eps", "momentum"):
        item = KEYS[f"optimizer.{key}"]
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield "no number", f"use one such as {item.default}"
        else:
            yield from _out_of_bounds(value, item.metadata)


def check_world_sizes(config: Config) -> Iterator[Refusal]:
    sizes = config.cluster.world_sizes
    if not sizes:
        yield "cluster.world_sizes", "empty", "use [1, 2]"
    named = [("world_size", config.world_size), *(("cluster.world_sizes", size) for size in sizes)]
    for key, size in named:
        if type(size) is not int or size < 1:
            remedy = "use 1 or more (world_size also: all)"
            yield f"{key}={size}", "not a number of ranks", remedy
        if size > MOST_RANKS:
            yield f"{key}={size}", "too large", f"use at most {MOST_RANKS}"


def check_watched_steps(config: Config) -> Iterator[Refusal]:
    """Require that steps and ranks to watch exist."""
    num_steps = config.train.warmup_steps + config.train.steps
    counts = {f"train.{key}": (num_steps, "step") for key in ("trace_steps", "profile_steps")}
    if type(config.world_size) is int:
        counts["train.profile_ranks"] = (config.world_size, "rank")
    for key, (count, what) in counts.items():
        for each in value_of(config, key):
            if type(each) is not int or not 0 <= each < count:
                yield (
                    f"{key}={each}",
                    f"no {what} of this run",
                    f"use numbers from 0 to {count - 1}",
                )


def check_range_of_ports(config: Config) -> Iterator[Refusal]:
    try:
        parse_port_range(config.cluster.slurm.ports or "1-65535")
    except ValueError:
        remedy = "use two of 1 to 65535, as 60001-63000"
        yield "cluster.slurm.ports", "no range of ports", remedy


def check_slurm_names(config: Config) -> Iterator[Refusal]:
    """Require names that Slurm could have: it would refuse others after the submission, or read another word."""
    for name in ("partition", "account", "qos", "constraint"):
        key = f"cluster.slurm.{name}"
        pattern = SLURM_FEATURES if name == "constraint" else SLURM_NAME
        if (value := value_of(config, key)) is not None and not pattern.fullmatch(value):
            problem = "no name that Slurm could have"
            yield f"{key}={value[:100]}", problem, "use the site's, or null"


def check_sbatch_options(config: Config) -> Iterator[Refusal]:
    for name, value in config.cluster.slurm.sbatch.items():
        key = f"cluster.slurm.sbatch.{name}"
        if not SBATCH_OPTION.fullmatch(str(name)) or isinstance(value, dict | list):
            remedy = "use +cluster.slurm.sbatch.reservation=mine"
            yield f"{key}={as_typed(value)}", "no option of sbatch with one value", remedy
        if "\n" in str(value):
            yield f"{key}={value!r}", "more than one line", "use one line"


def check_link(config: Config) -> Iterator[Refusal]:
    if (speed := config.cluster.link) is not None and not LINK_SPEED.fullmatch(speed):
        yield "cluster.link", "no speed", "use one such as 1gbit or 200mbit, or null"


def check_study(config: Config) -> Iterator[Refusal]:
    """Require that every key of an include row exists, and that must_equal names keys, groups or facts of a run."""
    for key in (key for row in config.study.include for key in row):
        value_of(config, key)
    for word in config.study.must_equal:
        group = word.partition(".")[0]
        if group in RUN_FACTS:
            continue
        if not hasattr(config, group):
            names = [*RUN_FACTS, *(field.name for field in fields(config))]
            problem = "no key and no fact of a run"
            yield f"study.must_equal={word}", problem, suggest_nearest(word, names)
        value_of(config, word)
