"""A limit of what torch allocates on the CPU holds from the byte on that exceeds it."""

from __future__ import annotations

import pytest
import torch

from zeroexp.measure.memory import count_cpu_allocations, limit_cpu_allocations

NO_LIMIT = 2**62


def test_an_allocation_beyond_the_limit_raises_and_what_was_held_stays():
    if reason := count_cpu_allocations():
        pytest.skip(reason)
    try:
        limit_cpu_allocations(1 << 30)
        held = torch.ones(1 << 20)
        limit_cpu_allocations(1 << 21)
        with pytest.raises(torch.OutOfMemoryError, match="exceeds the limit of 2097152"):
            torch.ones(1 << 20)
    finally:
        limit_cpu_allocations(NO_LIMIT)
    assert float(held.sum()) == 1 << 20
    assert torch.ones(1 << 20).numel() == 1 << 20
