"""What a second of the rates takes in a real step: a factor for each thing that seconds are spent on.

    measured seconds of a phase  =  sum of  factor x seconds by the rates

A rate is measured by itself, in a loop. In a step caches are cold, Python runs between operations, and ranks wait for
each other. The factors are those, none below 0, with which steps of small models come out with the least squares of
relative errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NUM_SWEEPS = 2000
# A factor stays near 1 unless phases speak against it: as strong as an error of this share of one phase.
INERTIA = 0.01


def fit_factors(phases: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Return the factors; `phases` are (what is spent -> seconds by the rates, measured seconds)."""
    names = sorted({name for spent, _ in phases for name in spent})
    rows = [[spent.get(name, 0.0) / measured for name in names] for spent, measured in phases]
    factors = [1.0] * len(names)
    left = [1.0 - sum(row) for row in rows]
    squares = [sum(row[j] ** 2 for row in rows) for j in range(len(names))]
    for _ in range(NUM_SWEEPS):  # one factor after the other, the others held
        for j, square in enumerate(squares):
            slope = sum(row[j] * rest for row, rest in zip(rows, left, strict=True))
            slope += INERTIA**2 * (1.0 - factors[j])
            change = max(slope / (square + INERTIA**2), -factors[j])
            factors[j] += change
            for i, row in enumerate(rows):
                left[i] -= change * row[j]
    return dict(zip(names, factors, strict=True))
