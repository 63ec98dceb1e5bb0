"""Rules about model, data and the steps over them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from zeroexp.check.refusal import Refusal
from zeroexp.config.data_kinds import DATA
from zeroexp.config.data_splits import TRAIN
from zeroexp.config.families import MODELS, shape_of, vocab_size_of_shape
from zeroexp.config.keys import Config
from zeroexp.config.vocabulary import SHIPPED_VOCABULARY

# A part of a split, as `datasets` writes it: test, test[:1000], train[10%:-5%].
ALL = "all"  # of `datasets`: every split
PART = re.compile(
    r"(?P<name>[^\[\]()+\s]+)(\[(?P<start>-?\d+(?:_\d+)*)?(?P<start_unit>%?):(?P<stop>-?\d+(?:_\d+)*)?(?P<stop_unit>%?)\])?(\(\w+\))?"
)


def check_task(config: Config) -> Iterator[Refusal]:
    """Require data that can train the model's task."""
    model, data = config.model, config.data
    tasks, given = MODELS[model.family].tasks, DATA[data.kind].tasks
    if model.task not in tasks:
        problem = f"model.family={model.family} can not be trained for it"
        yield "model.task", problem, f"use model.task={' or '.join(tasks)}, or another model"
    if tasks == ("regression",) and data.task != "regression":
        problem = f"takes vectors, data={data.name} gives tokens"
        yield "model", problem, "use data=vectors, or a language model"
    if data.task not in given:
        yield "data.task", f"data.kind={data.kind} has no such task", f"use {' or '.join(given)}"
    if data.task == "regression" and model.task != data.task:
        problem = f"data={data.name} gives vectors, model={model.name} takes tokens"
        yield "data.task", problem, "use data=offline, or model=mlp_tiny"
    if model.task != data.task:
        problem = f"model={model.name} is made for {model.task}"
        kinds = [kind for kind in DATA if model.task in DATA[kind].tasks]
        remedy = f"data.task={model.task}" if model.task in given else f"data={' or '.join(kinds)}"
        yield "data.task", problem, f"use {remedy}, or another model"


def check_labels(config: Config) -> Iterator[Refusal]:
    key, num_labels, named = "model.num_labels", config.model.num_labels, config.data.labels
    if config.model.task != "classification":
        return
    if num_labels is None:
        yield key, "the head needs it", "use model.num_labels=5"
    if num_labels == 1:
        yield key, "of one class the loss is 0, whatever the head says", "use 2 or more"
    if named is not None and len(named) != num_labels:
        problem = f"names {len(named)} classes for model.num_labels={num_labels}"
        yield "data.labels", problem, f"set model.num_labels={len(named)}"


def check_sequence_length(config: Config) -> Iterator[Refusal]:
    shape = shape_of(config.model)
    for key in ("max_position_embeddings", "n_positions", "max_positions"):
        limit = shape.get(key)
        if isinstance(limit, int) and config.data.seq_len > limit:
            problem = f"model={config.model.name} has {limit} positions"
            yield "data.seq_len", problem, f"use at most {limit}"


def check_vocabulary(config: Config) -> Iterator[Refusal]:
    key, size, data = "data.vocab_size", vocab_size_of_shape(config.model), config.data
    tokenizes = DATA[data.kind].tokenizes
    if data.vocab_size is not None and tokenizes and data.vocab_size != SHIPPED_VOCABULARY:
        problem = f"the shipped tokenizer has {SHIPPED_VOCABULARY} words"
        yield key, problem, f"use {SHIPPED_VOCABULARY}, or null"
    needed = data.vocab_size or (SHIPPED_VOCABULARY if tokenizes else None)
    if data.kind == "synthetic" and data.task == "causal" and size is None and needed is None:
        yield key, "the model names no vocabulary", f"set data.vocab_size={SHIPPED_VOCABULARY}"
    limit = size if config.model.weights is None else None
    if needed and isinstance(limit, int) and needed > limit:
        problem = f"model={config.model.name} knows {limit} words of the data's {needed}"
        yield key, problem, "use a model with a larger vocabulary"


def check_source(config: Config) -> Iterator[Refusal]:
    kind = DATA[config.data.kind]
    if config.data.path is None and kind.suffixes and not kind.ships:
        others = ", a folder or an id on the hub" if kind.is_table else " or a folder"
        yield "data.path", "names nothing to read", f"name a file{others}"
    elif config.data.path == "":
        remedy = "name a file or a folder, or leave it out for the shipped text"
        yield "data.path", "is empty", remedy


def check_validation(config: Config) -> Iterator[Refusal]:
    """Require something to validate on where validations are asked for, and another split than the training's."""
    data = config.data
    validation = data.validation_split
    if validation is not None and _overlap(data.split or TRAIN, validation):
        remedy = "use another split, or data.validation_samples"
        yield "data.validation_split", "has rows that are trained on", remedy
    nothing = data.validation_split is None and data.validation_samples is None
    if config.train.validate_every is not None and nothing:
        remedy = "set data.validation_samples=64, or data.validation_split for data=hf"
        yield "train.validate_every", "there is nothing to validate on", remedy


def check_batch(config: Config) -> Iterator[Refusal]:
    """Require that accumulation = global / (micro x world) is a whole number of microbatches."""
    micro, world = config.data.micro_batch_size, config.world_size
    below, rest = divmod(config.data.global_batch_size, micro * world)
    if rest:
        near = [str(count * micro * world) for count in (below, below + 1) if count]
        problem = f"not divisible by data.micro_batch_size={micro} x world_size={world}"
        yield "data.global_batch_size", problem, f"use {' or '.join(near)}"


def check_warmup(config: Config) -> Iterator[Refusal]:
    steps = config.train.warmup_steps + config.train.steps
    if config.optimizer.warmup_steps > steps:
        problem = f"the run is over after {steps} steps, before the learning rate is at its top"
        yield "optimizer.warmup_steps", problem, f"use at most {steps}"


def _overlap(one: str, other: str) -> bool:
    """Tell whether two splits, each a sum of parts, have rows in common; a split is taken for a long one.

    What one gives in per cent and the other in rows may have some, or may not.
    """
    pairs = [(a.strip(), b.strip()) for a in one.split("+") for b in other.split("+")]
    return any(a == b or _parts_overlap(PART.fullmatch(a), PART.fullmatch(b)) for a, b in pairs)


def _parts_overlap(one: re.Match[str] | None, other: re.Match[str] | None) -> bool:
    if one is None or other is None:
        return False
    if ALL not in (one["name"], other["name"]) and one["name"] != other["name"]:
        return False
    bounds = [(match, bound) for match in (one, other) for bound in ("start", "stop")]
    if len({match[f"{bound}_unit"] for match, bound in bounds if match[bound]}) > 1:
        return False
    starts = [_place(match["start"], match["start_unit"]) or (0, 0) for match in (one, other)]
    stops = [_place(match["stop"], match["stop_unit"]) or (2, 0) for match in (one, other)]
    return max(starts) < min(stops)


def _place(bound: str | None, unit: str) -> tuple[int, int] | None:
    """Return what orders the bounds of parts: rows that are counted from the end come behind the others."""
    if bound is None:
        return None
    number = int(bound)
    if unit == "%" and number < 0:
        number += 100
    return (int(number < 0), number)
