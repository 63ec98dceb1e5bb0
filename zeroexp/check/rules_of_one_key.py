"""Rules about one key at a time. Breaking one ends a sweep.

Choices, bounds and patterns stand beside the keys themselves, in config/keys.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from zeroexp.check.refusal import Refusal, as_typed, value_of
from zeroexp.config.keys import KEYS, LONGEST_NAME_BYTES, Config
from zeroexp.config.optimizer import OF_ENGINE, OPTIMIZERS, ROW_KEYS, OptimizerKind, rows_of
from zeroexp.config.parameter_kinds import KINDS, is_pattern
from zeroexp.config.plugins import REGISTRIES
from zeroexp.cut.engine_rules import why_not_over_all
from zeroexp.cut.layout import LAYOUTS
from zeroexp.process.ports import parse_port_range
from zeroexp.registry.did_you_mean import suggest_nearest, suggest_word

INCLUDE = "study.include"
# What study.must_equal may name beside keys and groups of the config.
RUN_FACTS = ("machine", "versions", "git", "engine", "transport", "load")

# Keys of a row of optimizer.kinds that have another name in the line.
OF_ALL = {
    "name": "optimizer.name",
    "layout": "strategy.implementation",
    "master": "precision.master",
    "over": "strategy.optimizer.over",
}
# The most that a whole number of a model's shape may be, by the key's last part: a larger model is built for minutes.
MOST_OF_SHAPE = {
    **{"num_hidden_layers": 1000, "n_layer": 1000, "depth": 1000},
    **{"num_experts": 256, "num_local_experts": 256},
}
MOST_OF_ANY = (1 << 31) - 1
MOST_MODULES = 10_000  # experts of all layers

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


def choices_of_keys() -> dict[str, list[str]]:
    """Return what each key may be, registered names too.

    A strategy's name may also be anything of a file of one's own.
    """
    declared = {key: [*item.metadata.get("choices", ())] for key, item in KEYS.items()}
    registered = {key: [word for words in REGISTRIES[key] for word in words] for key in REGISTRIES}
    choices = declared | registered | {"strategy.name": []}
    return {key: words for key, words in choices.items() if words}


def check_values(config: Config) -> Iterator[Refusal]:
    """Require what keys declare. The dtypes of a strategy follow those of the precision, which the user wrote."""
    choices = choices_of_keys()
    for key in sorted(KEYS, key=lambda key: key.startswith("strategy.")):
        for problem, remedy in _wrong_value(key, value_of(config, key), choices):
            yield key, problem, remedy


def _wrong_value(
    key: str, value: Any, choices: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str]]:
    default, declared = KEYS[key].default, KEYS[key].metadata
    if value is None and (default is None or key not in choices):
        return  # optimizer.max_grad_norm may be null too, whose default is a number
    if key in choices and value not in choices[key]:
        yield "unknown word", suggest_word(key, value, choices[key])
    if (least := declared.get("least")) is not None and value < least:
        yield "too small", f"use at least {least}"
    if (above := declared.get("above")) is not None and value <= above:
        yield "too small", f"use more than {above}"
    if (most := declared.get("most")) is not None and value > most:
        yield "too large", f"use at most {most}"
    pattern, *words = declared.get("like", [""])
    if words and not re.fullmatch(pattern, str(value)):
        yield words[0], words[1]
    is_list = str(KEYS[key].type).startswith(("list[str]", "list[Any]"))
    # OmegaConf takes a list in a list for a word.
    if is_list and any(each is None or isinstance(each, list | dict) for each in value or ()):
        yield "no list of words", "use one such as [a,b]"


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
        remedy = "use 0.95, as optimizer=muon does"
        yield "optimizer.momentum", "Muon needs one between 0 and 1", remedy


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
    name, group = own.get("name", config.optimizer.name), f"optimizer.kinds.{row}"
    if not isinstance(name, str) or name not in OPTIMIZERS:
        yield f"{group}.name={name}", "unknown word", suggest_nearest(str(name), OPTIMIZERS)
    kind = OPTIMIZERS[name]
    read = (*ROW_KEYS, *kind.keys)
    for key, value in own.items():
        named = f"{group}.{key}={value}"
        if key not in read:
            problem = f"a row of optimizer.name={name} reads no such key"
            yield named, problem, suggest_nearest(key, read)
        of_engine = _wrong_for_engine(config, key, value) if key in OF_ENGINE else ()
        for problem, remedy in (*_wrong_in_row(key, value, kind), *of_engine):
            yield named, problem, remedy
    # Of this row alone: nobody has checked those behind it.
    chosen = replace(config, optimizer=rows_of(replace(config.optimizer, kinds={row: own}))[row])
    for rule in (check_betas, check_momentum):
        for key, problem, remedy in rule(chosen):
            value = value_of(chosen, key)
            yield f"{group}.{key.removeprefix('optimizer.')}={value}", problem, remedy


def _wrong_in_row(key: str, value: Any, kind: OptimizerKind) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a value of a row, whose type nobody has checked."""
    of_all = OF_ALL.get(key, f"optimizer.{key}")
    default = KEYS[of_all].default
    if key == "settings":
        for word in value if isinstance(value, dict) else [value]:
            if word not in kind.settings:
                yield f"no such setting as {word}", suggest_nearest(word, kind.settings)
    elif key == "betas" and not (isinstance(value, list) and all(map(_is_number, value))):
        yield "not two numbers in [0, 1)", "use [0.9, 0.95]"
    elif isinstance(default, float) and not _is_number(value):
        yield "no number", f"use one such as {default}"
    else:
        yield from _wrong_value(of_all, value, {**choices_of_keys(), OF_ALL["layout"]: [*LAYOUTS]})


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _wrong_for_engine(config: Config, key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield why our engine does not do what a row says of its layout, master weights and ranks."""
    strategy, precision = config.strategy, config.precision
    if strategy.implementation not in LAYOUTS:
        does = {
            "layout": "cuts all parameters alike",
            "master": "updates all in one dtype",
            "over": "shards the states of all parameters over the same ranks",
        }[key]
        remedy = "leave it out, or use strategy.implementation=buffer"
        yield f"{strategy.implementation} {does}", remedy
    if key == "over" and value == strategy.optimizer.over:
        yield f"no effect, strategy.optimizer.over={value} is for all parameters", "leave it out"
    if key == "over" and value == "all" and (problem := why_not_over_all(strategy)):
        yield problem
    if key != "master":
        return
    if value == precision.master:
        yield f"no effect, master weights are {value} anyway", "leave it out"
    if "float16" in (precision.compute, precision.master) or precision.compute == "float32":
        yield f"parameters are {precision.compute}", "use precision=bf16_master or bf16"
    taken = {
        "offload": strategy.offload,
        "parameters.dtype": strategy.masters_rest,
        "outer": strategy.outer.every,
    }
    for word in (word for word in taken if taken[word]):
        yield f"strategy.{word} takes all master weights in one dtype", "leave one of the two out"


def check_watched_steps(config: Config) -> Iterator[Refusal]:
    """Require that steps and ranks to watch exist."""
    num_steps = config.train.warmup_steps + config.train.steps
    counts = {f"train.{key}": (num_steps, "step") for key in ("trace_steps", "profile_steps")}
    counts["train.profile_ranks"] = (config.world_size, "rank")
    for key, (count, what) in counts.items():
        for each in value_of(config, key):
            if type(each) is not int or not 0 <= each < count:
                remedy = f"use numbers from 0 to {count - 1}"
                yield f"{key}={each}", f"no {what} of this run", remedy


def check_range_of_ports(config: Config) -> Iterator[Refusal]:
    try:
        parse_port_range(config.cluster.slurm.ports or "1-65535")
    except ValueError:
        remedy = "use two of 1 to 65535, as 60001-63000"
        yield "cluster.slurm.ports", "no range of ports", remedy


def check_sbatch_options(config: Config) -> Iterator[Refusal]:
    for name, value in config.cluster.slurm.sbatch.items():
        key = f"cluster.slurm.sbatch.{name}"
        if not SBATCH_OPTION.fullmatch(str(name)) or isinstance(value, dict | list):
            remedy = "use +cluster.slurm.sbatch.reservation=mine"
            yield f"{key}={as_typed(value)}", "no option of sbatch with one value", remedy
        if "\n" in str(value):
            yield f"{key}={value!r}", "more than one line", "use one line"
        if name == "comment":
            yield f"{key}={value}", "sweeps find their jobs by a comment of ours", "leave it out"


def check_study(config: Config) -> Iterator[Refusal]:
    """Require a name that a folder may have, keys that exist in rows, and keys, groups or facts in must_equal."""
    for key in (key for row in config.study.include for key in row):
        value_of(config, key, INCLUDE)
    if len((config.study.name or "").encode()) > LONGEST_NAME_BYTES:
        problem = f"over {LONGEST_NAME_BYTES} bytes, and a folder has this name"
        yield "study.name", problem, "use a shorter one"
    if config.study.plan_must_hold and config.train.warmup_steps + config.train.steps < 2:
        problem = "the only step of a run is its first, which makes moments and is not as planned"
        yield "study.plan_must_hold=true", problem, "use train.warmup_steps=2"
    for word in config.study.must_equal:
        group = word.partition(".")[0]
        if group in RUN_FACTS:
            continue
        if not hasattr(config, group):
            names = [*RUN_FACTS, *(field.name for field in fields(config))]
            problem = "no key and no fact of a run"
            yield f"study.must_equal={word}", problem, suggest_nearest(word, names)
        value_of(config, word, "study.must_equal")
