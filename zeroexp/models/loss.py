"""Sum the loss of each task. The training loop divides by the number of valid labels of the step on all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from zeroexp.config.keys import ConfigError

IGNORED = -100  # label of a position without a target


def loss_sum(output: Any, labels: Tensor, task: str) -> Tensor:
    """Return the sum of the loss over all labels but IGNORED ones: 0-dim, float32 (or float64 for a float64 model).

    `output` is a tensor, or transformers' output with `.logits`.
    causal: logits [batch, seq, vocab], labels [batch, seq] int64, already shifted.
    classification: logits [batch, num_labels], labels [batch] int64.
    regression: values and labels of one shape; the sum of squared errors.
    """
    values = values_for_each(labels, output, task)
    values = values if values.dtype.itemsize > 4 else values.float()
    if task == "regression":
        return functional.mse_loss(values, labels.to(values.dtype), reduction="sum")
    assert task in ("causal", "classification"), task
    return functional.cross_entropy(
        values.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def count_valid(labels: Tensor, task: str) -> int:
    """Return how many labels `loss_sum` sums over."""
    return labels.numel() if task == "regression" else int((labels != IGNORED).sum())


def values_for_each(labels: Tensor, output: Any, task: str) -> Tensor:
    """Return the tensor of a model's output: logits, or values. Raises ConfigError if it has none for each label."""
    values = getattr(output, "logits", output)
    if not isinstance(values, Tensor):
        problem = f"model.task={task}: the model returns a {type(values).__name__}"
        raise ConfigError(f"{problem}; return a tensor, or an object with .logits")
    # Another shape might be broadcast to that of the labels.
    given, wanted = list(values.shape), list(labels.shape)
    if given != wanted if task == "regression" else given[:-1] != wanted:
        each = "a value" if task == "regression" else "a row of logits"
        problem = f"the model returns shape {given} for labels of shape {wanted}"
        raise ConfigError(f"model.task={task}: {problem}; return {each} for each label")
    return values
