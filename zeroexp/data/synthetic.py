"""Samples made from their index: they need no files, are the same on every rank, and can be learned."""

from __future__ import annotations

import numpy as np
import torch

from zeroexp.config.families import MODELS, shape_of, vocab_size_of_shape
from zeroexp.config.keys import ConfigError, DataConfig, ModelConfig
from zeroexp.data import Microbatch, Samples

NUM_SAMPLES = 1 << 16  # per epoch


def synthetic_samples(config: DataConfig, model: ModelConfig, seed: int) -> Samples:
    """Make vectors for regression, else tokens of the model's vocabulary. Raises ConfigError."""
    if config.task == "regression":
        return SyntheticVectors(width_of(model), config.seq_len, seed)
    words = config.vocab_size or vocab_size_of_shape(model)
    assert words is not None  # check_vocabulary
    return SyntheticTokens(words, config.seq_len, seed)


def width_of(model: ModelConfig) -> int:
    """Return the elements of one vector that the model takes. Raises ConfigError."""
    width = shape_of(model).get("width")
    if type(width) is not int:
        key = f"model.{MODELS[model.family].shape}.width"
        raise ConfigError(f"{key}={width}: vectors need it; set it to the elements of one vector")
    return width


class SyntheticTokens:
    """Counting sequences: every sample starts at a random number and grows by 1 to 8, modulo the vocabulary."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        self.vocab_size: int | None = vocab_size
        self.source = f"synthetic: counting modulo {vocab_size}"
        self._words, self._seq_len, self._seed = vocab_size, seq_len, seed

    def __len__(self) -> int:
        return NUM_SAMPLES

    def read(self, indices: np.ndarray) -> Microbatch:
        rows = torch.from_numpy(np.stack([self._row(int(index)) for index in indices]))
        return Microbatch({"input_ids": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous())

    def _row(self, index: int) -> np.ndarray:
        random = np.random.default_rng([self._seed, index])
        start, stride = random.integers(self._words), random.integers(1, 9)
        return (start + stride * np.arange(self._seq_len + 1)) % self._words

    def count_labels_and_tokens(self, indices: np.ndarray) -> tuple[int, int]:
        num_tokens = len(indices) * self._seq_len
        return num_tokens, num_tokens


class SyntheticVectors:
    """Regression on `seq_len` normal vectors per sample: the target is the tanh of the left neighbour."""

    def __init__(self, width: int, seq_len: int, seed: int) -> None:
        self.vocab_size: int | None = None
        self.source = f"synthetic: vectors of {width}"
        self._shape, self._seed = (seq_len, width), seed

    def __len__(self) -> int:
        return NUM_SAMPLES

    def read(self, indices: np.ndarray) -> Microbatch:
        vectors = torch.from_numpy(np.stack([self._row(int(index)) for index in indices]))
        return Microbatch({"vectors": vectors}, vectors.roll(1, dims=-1).tanh())

    def _row(self, index: int) -> np.ndarray:
        random = np.random.default_rng([self._seed, index])
        return random.standard_normal(self._shape, dtype=np.float32)

    def count_labels_and_tokens(self, indices: np.ndarray) -> tuple[int, int]:
        seq_len, width = self._shape
        return len(indices) * seq_len * width, len(indices) * seq_len
