"""What every test may ask for: `ranks(function, *args, world_size=2)`, see tests/ranks.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is imported anywhere: two ranks on two cores each compute with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from tests.ranks import Ranks

torch.set_num_threads(1)

# A slow machine is no failure; where CI is set, hypothesis has a profile of its own, without chance.
hypothesis.settings.register_profile("here", deadline=None)
if "CI" not in os.environ:
    hypothesis.settings.load_profile("here")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
