"""Decide which sample a run reads at which position: each epoch has one permutation of all samples."""

from __future__ import annotations

import functools

import numpy as np


def sample_indices(start: int, count: int, *, num_samples: int, seed: int) -> np.ndarray:
    """Return the indices of the samples at positions start ... start + count, [count] int64; they may cross epochs."""
    positions = np.arange(start, start + count)
    epochs, places = np.divmod(positions, num_samples)
    indices = np.empty(count, dtype=np.int64)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        here = epochs == epoch
        indices[here] = _permutation(num_samples, seed, epoch)[places[here]]
    return indices


@functools.lru_cache(maxsize=2)  # a batch spans at most two epochs
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_samples)
