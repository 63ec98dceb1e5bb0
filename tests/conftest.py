"""What every test may ask for: `ranks(function, *args, world_size=2)`, see tests/ranks.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is imported anywhere: two ranks on two cores each compute with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.ranks import Ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
