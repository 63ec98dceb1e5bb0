"""--fit looks for the largest number whose peak is within the limit, in as few rehearsals as it can."""

from __future__ import annotations

import pytest

from zeroexp.plan.fewest_ranks import largest

MIB = 2**20
# Peaks over a number of samples or tokens.
PEAKS = {
    "a line": lambda n: 100 * MIB + 3000 * n,
    "model states, then a line": lambda n: max(100 * MIB, 40 * MIB + 3000 * n),
    "a parabola": lambda n: 100 * MIB + 3000 * n + 7 * n * n,
    "a flat line": lambda n: 100 * MIB,
    "steps": lambda n: 100 * MIB + 3_000_000 * (n // 1000),
}


@pytest.mark.parametrize("kind", PEAKS)
@pytest.mark.parametrize(("step", "most"), [(1, 65536), (64, 100), (64, 2048), (16, 1 << 20)])
@pytest.mark.parametrize("limit_mib", [99, 100, 100.1, 101, 150, 1000])
def test_the_largest_that_fits_is_found(kind, step, most, limit_mib):
    """As one would who tries them all."""
    peak, limit, tries = PEAKS[kind], int(limit_mib * MIB), 0

    def counted(n: int) -> int:
        nonlocal tries
        tries += 1
        return peak(n)

    numbers = [*range(step, most, step), most]
    expected = max((n for n in numbers if peak(n) <= limit), default=None)
    assert largest(counted, limit, step=step, most=most) == expected
    assert tries <= 2 * (most // step).bit_length()
