"""What a second of the rates takes in a real step: a factor for each thing that seconds are spent on.

    measured seconds of a phase  =  sum of  factor x seconds by the rates

A rate is measured by itself, in a loop. In a step caches are cold, Python runs between operations, and ranks wait for
each other. The factors are those, none below 0, with which steps of small models come out with the least squares of
relative errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

NUM_SWEEPS = 2000
# A factor stays near 1 unless phases speak against it: as strong as an error of this share of one phase.
INERTIA = 0.01


def fit_factors(phases: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Return the factors; `phases` are (what is spent -> seconds by the rates, measured seconds)."""
    names = sorted({name for spent, _ in phases for name in spent})
    shares = np.array([[spent.get(name, 0.0) / took for name in names] for spent, took in phases])
    factors, left = np.ones(len(names)), 1 - shares.sum(axis=1)
    for _ in range(NUM_SWEEPS):  # one factor after the other, the others held
        for j, column in enumerate(shares.T):
            slope = column @ left + INERTIA**2 * (1 - factors[j])
            change = max(slope / (column @ column + INERTIA**2), -factors[j])
            factors[j] += change
            left -= change * column
    return dict(zip(names, factors.tolist(), strict=True))
