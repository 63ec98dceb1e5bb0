"""One rank of a world whose other ranks do not exist: collectives return at once and move nothing.

For what does not depend on values: which moves happen, what they count, what memory is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from zeroexp.world import World


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        yield World(rank, size, torch.device("cpu"), "fake")
    finally:
        dist.destroy_process_group()
