"""A data source of others is tried before it trains: a wrong count would scale the loss, and nobody would notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from zeroexp.config.keys import ConfigError, DataConfig
from zeroexp.data import Microbatch
from zeroexp.models.loss import count_valid

CALLED = ("__len__", "read", "count_labels_and_tokens")
MEMBERS = ("vocab_size", "source", *CALLED)


def require_samples(samples: Any, config: DataConfig) -> None:
    """Read the first samples. Raises ConfigError unless they are what data/__init__.py says of Samples."""

    def refuse(problem: str, remedy: str) -> NoReturn:
        raise ConfigError(f"data.kind={config.kind}: {problem}; {remedy}")

    missing = [name for name in MEMBERS if not hasattr(samples, name)]
    missing += [name for name in CALLED if not callable(getattr(samples, name, print))]
    if missing:
        problem = f"opens a {type(samples).__name__} without {', '.join(missing)}"
        refuse(problem, "return Samples of zeroexp/data/__init__.py")
    if not len(samples):
        refuse("has no samples", "give it some, or other settings")
    indices = np.arange(min(len(samples), 2))
    read = samples.read(indices)
    if not isinstance(read, Microbatch) or not isinstance(read.labels, Tensor):
        refuse(f"reads a {type(read).__name__}", "return Microbatch(inputs, labels)")
    for name, tensor in {**read.inputs, "labels": read.labels}.items():
        if not isinstance(tensor, Tensor) or len(tensor) != len(indices):
            problem = f"reads {len(indices)} samples with {name} of {_shape(tensor)}"
            refuse(problem, "let the first dimension be the number of samples")
    _require_words(read, samples.vocab_size, config, refuse)
    counted = samples.count_labels_and_tokens(indices)
    if not isinstance(counted, tuple) or len(counted) != 2:
        refuse(f"counts {counted!r:.80}", "return (labels that count, input tokens)")
    expected = count_valid(read.labels, config.task)
    if counted[0] != expected:
        problem = f"counts {counted[0]} labels in samples that have {expected}"
        refuse(problem, "count those that are not -100: the loss is divided by their number")


def _require_words(
    read: Microbatch, words: int | None, config: DataConfig, refuse: Callable[[str, str], NoReturn]
) -> None:
    if config.task == "regression":
        return
    if read.labels.dtype != torch.int64:
        refuse(f"reads labels of {read.labels.dtype}", "make them int64")
    tokens = read.inputs.get("input_ids")
    if tokens is None:
        refuse(f"reads {', '.join(read.inputs)} alone", "name the tokens input_ids")
    if words is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < words:
        problem = f"reads tokens {int(tokens.min())} to {int(tokens.max())}"
        refuse(problem, f"vocab_size={words} allows 0 to {words - 1}")


def _shape(tensor: Any) -> str:
    return f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
