"""Rules about one key at a time: words and ranges. Breaking one is a ConfigError."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from zeroexp.check.aliases import suggest_word
from zeroexp.check.refusal import refuse_key, suggest_nearest, value_of
from zeroexp.config.keys import AUTO, ENGINE_SETTINGS, Config, ConfigError
from zeroexp.config.plugins import REGISTRIES
from zeroexp.cut.stage import Placement
from zeroexp.process.ports import parse_port_range
from zeroexp.registry import RegistryError

DTYPES = ("float32", "bfloat16")
PLACEMENTS = tuple(placement.value for placement in Placement)
TASKS = ("causal", "classification", "regression")

# None means "left to the default", for keys that allow it. Words that others may add to: open_words.
WORDS: dict[str, tuple[str | None, ...]] = {
    "model.task": TASKS,
    "data.task": TASKS,
    "strategy.parameters.placement": PLACEMENTS,
    "strategy.gradients.placement": PLACEMENTS,
    "strategy.optimizer.placement": PLACEMENTS,
    "precision.compute": DTYPES,
    "precision.reduce": DTYPES,
    "precision.master": DTYPES,
    "strategy.parameters.dtype": DTYPES,
    "strategy.gradients.dtype": DTYPES,
    "strategy.optimizer.dtype": DTYPES,
    **{f"strategy.{k}": (None, *v["words"]) for k, v in ENGINE_SETTINGS.items() if v["words"]},
    "optimizer.schedule": ("constant", "cosine", "linear"),
    "cluster.kind": ("local", "slurm"),
    "cluster.device": ("auto", "cpu", "cuda"),
}

MOST_REPEATS = 100
# What study.must_equal may name beside keys and groups of the config.
RUN_FACTS = ("machine", "versions", "git", "engine", "transport", "load")

AT_LEAST = {
    "repeats": 1,
    "data.seq_len": 1,
    "data.global_batch_size": 1,
    "data.micro_batch_size": 1,
    "data.vocab_size": 1,
    "data.limit": 1,
    "data.validation_samples": 1,
    "model.num_labels": 1,
    "strategy.prefetch": 0,
    "optimizer.momentum": 0,
    "optimizer.weight_decay": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.min_lr_ratio": 0,
    "train.seed": 0,
    "train.warmup_steps": 0,
    "train.steps": 1,
    "train.validate_every": 1,
    "train.recompute_every": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "cluster.threads_per_rank": 1,
    "cluster.timeout_s": 1,
    "cluster.heartbeat_s": 1,
    "cluster.rehearse_s": 0,
    "cluster.start_s": 1,
    "cluster.hang_s": 1,
    "tracking.system_s": 0.1,  # a sample takes milliseconds
    "cluster.slurm.ranks_per_node": 1,
    "cluster.slurm.cpus_per_rank": 1,
    "cluster.slurm.max_running": 1,
    "cluster.slurm.max_requeues": 1,
    "cluster.slurm.save_s": 1,
}
WATCHED = ("trace_steps", "profile_steps", "hash_steps")
ABOVE_ZERO = (
    *("optimizer.lr", "optimizer.eps", "optimizer.max_grad_norm", "study.loss_agreement"),
    *("cluster.device_memory_gib", "cluster.reserved_gib", "cluster.peak_tflops"),
    "cluster.slurm.memory_gb",
)
# No experiment needs more, and beyond these the system, torch or a person's patience gives up.
YEAR_S = 366 * 24 * 60 * 60
AT_MOST = {
    "data.seq_len": 1 << 24,
    "data.global_batch_size": 1 << 31,
    "data.micro_batch_size": 1 << 24,
    "data.vocab_size": 1 << 31,
    "data.limit": 1 << 31,
    "model.num_labels": 1 << 20,
    "strategy.prefetch": 1024,
    "optimizer.momentum": 1,
    "optimizer.min_lr_ratio": 1,
    "optimizer.warmup_steps": 10**9,
    "train.seed": 2**32 - 1,
    "train.warmup_steps": 10**9,
    "train.steps": 10**9,
    "checkpoint.every": 10**9,
    "checkpoint.keep": 10**6,
    "cluster.threads_per_rank": 1024,
    "cluster.timeout_s": YEAR_S,
    "cluster.heartbeat_s": YEAR_S,
    "cluster.rehearse_s": YEAR_S,
    "cluster.hang_s": YEAR_S,
    "cluster.device_memory_gib": 10**6,
    "cluster.reserved_gib": 10**6,
    "cluster.slurm.ranks_per_node": 1024,
    "cluster.slurm.cpus_per_rank": 1024,
    "cluster.slurm.max_running": 10**6,
    "cluster.slurm.max_requeues": 10**6,
    "cluster.slurm.memory_gb": 10**6,
    "cluster.slurm.save_s": YEAR_S,
}
MOST_RANKS = 1 << 24
BUCKET_MB = (0.001, 1 << 20)
# Whole numbers in a model's shape, which the key's last part names; a larger model would be built for minutes.
MOST_OF_SHAPE = {
    **{"num_hidden_layers": 1000, "n_layer": 1000, "depth": 1000},
    **{"num_experts": 256, "num_local_experts": 256},
}
MOST_OF_ANY = (1 << 31) - 1
MOST_MODULES = 10_000  # experts of all layers

LISTS_OF_WORDS = (
    *("model.freeze", "model.blocks", "data.labels", "study.must_equal", "train.recompute_except"),
    *("cluster.slurm.setup", "cluster.slurm.srun"),
)

# The name of a folder contains no path separator, and file systems accept it.
NAME = re.compile(r"[\w][\w .+-]{0,99}")


def check_all_given(config: Config) -> None:
    """Require that no value is missing and no number is nan or infinite, because comparisons would accept those.

    A published model may hold any: Mamba's time steps have infinity as their limit.
    """
    for key, value in _values(asdict(config)):
        if value == "???":
            refuse_key(key, value, "no value", "give it one")
        published = key.startswith("model.published.")
        if isinstance(value, float) and not math.isfinite(value) and not published:
            refuse_key(
                key, value, "no finite number", "use a finite one, or null where that is allowed"
            )


def _values(tree: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _values(value, f"{parent}.{key}" if parent else str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from _values(value, parent)
    else:
        yield parent, tree


def check_names(config: Config) -> None:
    """Require valid names for folders and for objects in MLflow."""
    groups = ("model", "data", "strategy", "cluster", "precision", "optimizer", "tracking", "study")
    for key in (*(f"{group}.name" for group in groups), "tracking.experiment"):
        if (value := value_of(config, key)) is not None and not NAME.fullmatch(value):
            remedy = "use letters, digits, spaces and . _ + -, at most 100 in all"
            refuse_key(key, value if len(value) <= 100 else f"{value[:20]}...", "no name", remedy)
    if not config.outputs:
        refuse_key("outputs", "", "no folder", "use outputs=outputs")
    if config.outputs.startswith("~") or "$" in config.outputs:
        problem = "would be a folder of that name here: no shell has replaced its ~ or $"
        refuse_key("outputs", config.outputs, problem, "use outputs=$HOME/...")


def check_lists_of_words(config: Config) -> None:
    """Require plain lists, since OmegaConf takes a list in a list for a word."""
    for key in LISTS_OF_WORDS:
        value = value_of(config, key)
        if any(item is None or isinstance(item, list | dict) for item in value or ()):
            refuse_key(key, value, "no list of words", "use one such as [a,b]")


def open_words() -> dict[str, tuple[str | None, ...]]:
    """Return the registered words of each key; a strategy's name may also be anything of a file of one's own."""
    known = {
        key: tuple(word for registry in registries for word in registry)
        for key, registries in REGISTRIES.items()
        if key != "strategy.name"
    }
    return {**known, "strategy.owners": (None, *known["strategy.owners"])}


def check_words(config: Config) -> None:
    for key, known in {**WORDS, **open_words()}.items():
        if (value := value_of(config, key)) not in known:
            words = [word for word in known if word]
            refuse_key(
                key,
                value,
                "unknown word",
                suggest_word(key, value, words) or suggest_nearest(value, words),
            )
    for key, registries in REGISTRIES.items():
        word = value_of(config, key)
        for registry in registries:
            if word in registry:
                try:
                    registry[word]
                except RegistryError as error:
                    raise ConfigError(str(error)) from error


def check_ranges(config: Config) -> None:
    for key, low in AT_LEAST.items():
        if (value := value_of(config, key)) is not None and value < low:
            refuse_key(key, value, "too small", f"use at least {low}")
    for key in ABOVE_ZERO:
        if (value := value_of(config, key)) is not None and value <= 0:
            refuse_key(key, value, "too small", "use more than 0")
    for key, high in AT_MOST.items():
        if (number := value_of(config, key)) is not None and number > high:
            refuse_key(key, number, "too large", f"use at most {high}")


def check_shapes(config: Config) -> None:
    for name in ("hf_config", "mlp", "moe", "settings"):
        for key, value in _values(getattr(config.model, name), f"model.{name}"):
            most: int = MOST_OF_SHAPE.get(key.rpartition(".")[2], MOST_OF_ANY)
            if isinstance(value, int) and not -most <= value <= most:
                refuse_key(key, value, "too large", f"use at most {most}")
    depth, experts = config.model.moe.get("depth"), config.model.moe.get("num_experts")
    if isinstance(depth, int) and isinstance(experts, int) and depth * experts > MOST_MODULES:
        problem = f"too many with model.moe.depth={depth}"
        refuse_key(
            "model.moe.num_experts", experts, problem, f"use at most {MOST_MODULES // depth}"
        )


def check_betas(config: Config) -> None:
    values = config.optimizer.betas
    if len(values) != 2 or not all(0 <= beta < 1 for beta in values):
        refuse_key("optimizer.betas", values, "not two numbers in [0, 1)", "use [0.9, 0.95]")


def check_world_sizes(config: Config) -> None:
    if not config.cluster.world_sizes:
        refuse_key("cluster.world_sizes", "[]", "empty", "use [1, 2]")
    for key in ("world_size", "cluster.world_sizes"):
        value = value_of(config, key)
        for size in value if key == "cluster.world_sizes" else [value]:
            if type(size) is not int or size < 1:
                refuse_key(
                    key, size, "not a number of ranks", "use 1 or more (world_size also: all)"
                )
            if size > MOST_RANKS:
                refuse_key(key, size, "too large", f"use at most {MOST_RANKS}")


def check_bucket(config: Config) -> None:
    size = config.strategy.bucket_mb
    if size in (None, AUTO):
        return
    least, most = BUCKET_MB
    if isinstance(size, bool) or not isinstance(size, int | float) or not least <= size <= most:
        remedy = f"use {least} to {most}, auto (measured once per cluster), or null"
        refuse_key("strategy.bucket_mb", size, "not a size in MiB", remedy)


def check_repeats(config: Config) -> None:
    if config.repeats > MOST_REPEATS:
        refuse_key("repeats", config.repeats, "too large", f"use at most {MOST_REPEATS}")


def check_watched_steps(config: Config) -> None:
    """Require that steps and ranks to watch exist."""
    train, size = config.train, config.world_size
    num_steps = train.warmup_steps + train.steps
    rows = [
        *[(f"train.{key}", getattr(train, key), num_steps, "step") for key in WATCHED],
        *(
            [("train.profile_ranks", train.profile_ranks, size, "rank")]
            if type(size) is int
            else []
        ),
    ]
    for key, chosen, number, what in rows:
        for each in chosen:
            if type(each) is not int or not 0 <= each < number:
                refuse_key(
                    key, each, f"no {what} of this run", f"use numbers from 0 to {number - 1}"
                )


def check_range_of_ports(config: Config) -> None:
    if (told := config.cluster.slurm.ports) is not None:
        try:
            parse_port_range(told)
        except ValueError:
            key = "cluster.slurm.ports"
            refuse_key(key, told, "no range of ports", "use two of 1 to 65535, as 60001-63000")


def check_study(config: Config) -> None:
    """Require that every key of an include row exists, and that must_equal names keys, groups or facts of a run."""
    for row in config.study.include:
        for key in row:
            value_of(config, key)
    for word in config.study.must_equal:
        group = word.partition(".")[0]
        if group not in RUN_FACTS and not hasattr(config, group):
            known = [*RUN_FACTS, *(field.name for field in fields(config))]
            refuse_key(
                "study.must_equal",
                word,
                "no key and no fact of a run",
                suggest_nearest(word, known),
            )
        if group not in RUN_FACTS:
            value_of(config, word)


RULES = (
    *(
        check_all_given,
        check_names,
        check_lists_of_words,
        check_words,
        check_ranges,
        check_shapes,
        check_betas,
        check_world_sizes,
        check_bucket,
        check_repeats,
        check_watched_steps,
    ),
    *(check_range_of_ports, check_study),
)
