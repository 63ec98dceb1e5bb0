"""Rules about model and data together."""

from __future__ import annotations

from zeroexp.check.refusal import refuse_combination
from zeroexp.config.data_sources import DATA
from zeroexp.config.families import MODELS, shape_of
from zeroexp.config.families import vocabulary as words_of
from zeroexp.config.keys import Config
from zeroexp.config.vocabulary import SHIPPED_WORDS


def check_task(config: Config) -> None:
    """Require data that can train the model's task."""
    model, data = config.model, config.data
    tasks, given = MODELS[model.family].tasks, DATA[data.kind].tasks
    if model.task not in tasks:
        problem = f"model.family={model.family} can not be trained for it"
        remedy = f"use model.task={' or '.join(tasks)}, or another model"
        refuse_combination(config, "model.task", problem, remedy)
    if tasks == ("regression",) and data.task != "regression":
        problem = f"takes vectors, data={data.name} gives tokens"
        refuse_combination(config, "model", problem, "use data=vectors, or a language model")
    if data.task not in given:
        problem = f"data.kind={data.kind} has no such task"
        refuse_combination(config, "data.task", problem, f"use {' or '.join(given)}")
    if model.task != data.task:
        problem = f"model={model.name} is made for {model.task}"
        remedy = f"use data.task={model.task} or another model"
        refuse_combination(config, "data.task", problem, remedy)


def check_labels(config: Config) -> None:
    task = config.model.task
    if task == "classification" and config.model.num_labels is None:
        remedy = "use model.num_labels=5"
        refuse_combination(config, "model.num_labels", "the head needs it", remedy)
    if task == "classification" and config.model.num_labels == 1:
        problem = "of one class the loss is 0, whatever the head says"
        refuse_combination(config, "model.num_labels", problem, "use 2 or more")
    named = config.data.labels
    if named is not None and task == "classification" and len(named) != config.model.num_labels:
        problem = f"names {len(named)} classes for model.num_labels={config.model.num_labels}"
        refuse_combination(config, "data.labels", problem, f"set model.num_labels={len(named)}")


def check_sequence_length(config: Config) -> None:
    model = config.model
    shape = shape_of(model)
    for key in ("max_position_embeddings", "n_positions", "max_positions"):
        limit = shape.get(key)
        if isinstance(limit, int) and config.data.seq_len > limit:
            problem = f"model={model.name} has {limit} positions"
            refuse_combination(config, "data.seq_len", problem, f"use at most {limit}")


def check_vocabulary(config: Config) -> None:
    vocabulary, asked, data = words_of(config.model), config.data.vocab_size, config.data
    tokenizes = DATA[data.kind].tokenizes
    if asked is not None and tokenizes and asked != SHIPPED_WORDS:
        problem = f"the shipped tokenizer has {SHIPPED_WORDS} words"
        refuse_combination(config, "data.vocab_size", problem, f"use {SHIPPED_WORDS}, or null")
    if data.kind == "synthetic" and data.task == "causal" and vocabulary is None and asked is None:
        problem, remedy = "the model names no vocabulary", f"set data.vocab_size={SHIPPED_WORDS}"
        refuse_combination(config, "data.vocab_size", problem, remedy)
    words = asked or (SHIPPED_WORDS if tokenizes else None)
    if (
        words
        and isinstance(vocabulary, int)
        and config.model.weights is None
        and words > vocabulary
    ):
        problem = f"model={config.model.name} knows {vocabulary} words of the data's {words}"
        remedy = "use a model with a larger vocabulary"
        refuse_combination(config, "data.vocab_size", problem, remedy)


def check_source(config: Config) -> None:
    if DATA[config.data.kind].is_table and config.data.path is None:
        problem, remedy = "names nothing to read", "name a file, a folder or an id on the hub"
        refuse_combination(config, "data.path", problem, remedy)


def check_validation(config: Config) -> None:
    """Require something to validate on where validations are asked for, and another split than the training's."""
    data = config.data
    if data.validation_split is not None and data.validation_split == (data.split or "train"):
        problem, remedy = "is what is trained on", "use another split, or data.validation_samples"
        refuse_combination(config, "data.validation_split", problem, remedy)
    nothing = data.validation_split is None and data.validation_samples is None
    if config.train.validate_every is not None and nothing:
        problem = "there is nothing to validate on"
        remedy = "set data.validation_samples=64, or data.validation_split for data=hf"
        refuse_combination(config, "train.validate_every", problem, remedy)


RULES = (
    *(check_task, check_labels, check_sequence_length, check_vocabulary, check_source),
    check_validation,
)
