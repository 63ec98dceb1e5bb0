"""What a model of torch's caching allocator reserves is what its rules say, by arithmetic, and what a GPU reserved.

reserved_on_h200.json has what torch's own reserved after each change of the sequences that are drawn below: it was run
on a GPU, with and without expandable segments, and the model has to reserve the same bytes after each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from zeroexp.plan.caching_allocator import (
    Block,
    CachingAllocator,
    Change,
    OutOfDeviceMemory,
    expands_segments,
    replay,
)

KIB, MIB = 2**10, 2**20


def after(*changes: Change, expandable: bool = False, limit: float = inf) -> CachingAllocator:
    return replay(changes, expandable=expandable, limit=limit)


def born(*sizes: int, stream: str = "") -> list[Change]:
    """Allocations numbered from 0."""
    return [(key, size, stream) for key, size in enumerate(sizes)]


def dead(*keys: int) -> list[Change]:
    return [(key, 0, "") for key in keys]


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1, 512, 513], 4 * 512, 2 * MIB),
        ([MIB, MIB - 1], 2 * MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        ([MIB + 1, 9 * MIB, 8 * MIB], 18 * MIB + 512, 20 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),
        # What is over is at most 1 MiB, so that the block stays whole; or it is just more.
        ([10 * MIB - 512, 10 * MIB - 512, 2 * MIB], 22 * MIB, 40 * MIB),
        ([11 * MIB], 12 * MIB, 12 * MIB),
        ([31 * MIB - 512], 31 * MIB - 512, 32 * MIB),
    ],
)
def test_requests_are_rounded_and_packed_into_segments(sizes, allocated, reserved):
    held = after(*born(*sizes))
    assert (held.allocated_bytes, held.reserved_bytes) == (allocated, reserved)


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1, MIB, MIB], 4 * MIB),  # pages of 2 MiB
        ([MIB + 1], 20 * MIB),
        ([21 * MIB], 40 * MIB),
        ([21 * MIB, 19 * MIB], 40 * MIB),  # the rest of the second page
        ([21 * MIB, 19 * MIB + 1], 60 * MIB),  # that rest, and a page behind it
    ],
)
def test_an_expandable_segment_grows_by_pages(sizes, reserved):
    held = after(*born(*sizes), expandable=True)
    assert held.reserved_bytes == reserved


def test_a_full_device_gets_back_segments_that_are_free_as_a_whole():
    """Two of 20 MiB are, whose room one of 40 MiB takes; that of 30 is in use at its beginning."""
    changes = [*born(20 * MIB, 20 * MIB, 30 * MIB), *dead(0, 1, 2), (3, 22 * MIB, "")]
    held = after(*changes, (4, 40 * MIB, ""), limit=70 * MIB)
    assert (held.num_retries, held.reserved_bytes, held.peak_bytes) == (1, 70 * MIB, 70 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        after(*changes, (4, 40 * MIB + 1, ""), limit=70 * MIB)
    assert after(*changes, (4, 40 * MIB, "")).reserved_bytes == 110 * MIB, "without a limit"


def test_a_full_device_gets_back_the_pages_of_an_expandable_segment_that_are_free_as_a_whole():
    """
        addresses, MiB   0    25    60   80
        before           free | used | free    60 MiB free of 80, of which the first page and the last are whole
        after                 25 to 60 used, 20 to 25 free: 40 MiB, and 60 more for another stream
    """  # fmt: skip
    changes = [*born(25 * MIB, 35 * MIB, 20 * MIB), *dead(0, 2)]
    held = after(*changes, (3, 60 * MIB, "other"), expandable=True, limit=100 * MIB)
    assert (held.num_retries, held.reserved_bytes) == (1, 100 * MIB)
    # The first page is mapped again, at the lowest addresses, where 20 MiB join the 5 that stayed.
    again = [*changes, (3, 60 * MIB, "other"), (3, 0, "other"), (4, 25 * MIB, "")]
    held = after(*again, expandable=True, limit=100 * MIB)
    assert (held.num_retries, held.reserved_bytes, held.allocated_bytes) == (2, 60 * MIB, 60 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        after(*changes, (3, 61 * MIB, "other"), expandable=True, limit=100 * MIB)


def test_retries_are_those_of_the_last_part():
    step = [(0, MIB + 1, "compute"), (0, 0, ""), (1, MIB + 1, "gather"), (1, 0, "")]
    assert replay(step, step, expandable=False, limit=20 * MIB).num_retries == 2
    assert replay(step, [], expandable=False, limit=20 * MIB).num_retries == 0


@pytest.mark.parametrize(
    ("environment", "expands"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[64:8,>:1]"}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_ranks_take_the_settings_of_their_environment(environment, expands):
    assert expands_segments(environment) == expands


# -- a GPU ------------------------------------------------------------------------------------------

Draw = Callable[[random.Random], int]
TRUTH = json.loads((Path(__file__).parent / "reserved_on_h200.json").read_text("utf-8"))[
    "sequences"
]


def small(draw: random.Random) -> int:
    exact = (1, 4, 100, 512, 513, 2048, 4096)
    return draw.choice([*exact, draw.randrange(1, MIB), draw.randrange(1, 65536), MIB, MIB - 1])


def large(draw: random.Random) -> int:
    between = draw.randrange(MIB + 1, 10 * MIB)
    of_own = [draw.randrange(10 * MIB, 60 * MIB) for _ in range(2)]
    edges = [10 * MIB - 1, 10 * MIB]
    return draw.choice([MIB + 1, 2 * MIB, between, *edges, *of_own, 32 * MIB, 20 * MIB])


def mixed(draw: random.Random) -> int:
    return small(draw) if draw.random() < 0.6 else large(draw)


def repeated(draw: random.Random) -> int:
    return draw.choice([14 * MIB, 14 * MIB, 28 * MIB, 3 * MIB, 7 * MIB, MIB // 2])


def huge(draw: random.Random) -> int:
    return draw.randrange(4 * MIB, 300 * MIB) if draw.random() < 0.8 else small(draw)


# Seed, sizes, number of changes, the most that live at once, and streams.
DRAWN: dict[str, tuple[int, Draw, int, int, int]] = {
    "small": (1, small, 3000, 120, 1),
    "large": (2, large, 1500, 40, 1),
    "mixed": (3, mixed, 4000, 100, 1),
    "repeated": (4, repeated, 3000, 60, 1),
    "streams": (5, mixed, 4000, 120, 3),
    "full": (6, huge, 1500, 9, 2),
}


def drawn(seed: int, size: Draw, num: int, most_alive: int, num_streams: int) -> list[Change]:
    draw, changes, alive = random.Random(seed), list[Change](), list[int]()
    for _ in range(num):
        if alive and (len(alive) >= most_alive or draw.random() < 0.45):
            changes.append((alive.pop(draw.randrange(len(alive))), 0, 0))
        else:
            key = sum(1 for _, num_bytes, _ in changes if num_bytes)
            changes.append((key, size(draw), draw.randrange(num_streams)))
            alive.append(key)
    return changes


@pytest.mark.parametrize("name", TRUTH)
def test_after_each_change_it_has_reserved_what_the_allocator_of_a_gpu_has(name):
    """`full`: a tensor leaves 2 GiB of the device free, so that pages are given back, 15 times."""
    sequence, _, setting = name.partition(" ")
    truth, blocks = TRUTH[name], dict[int, Block]()
    allocator = CachingAllocator(expandable=setting == "True", limit=truth.get("limit", inf))
    if "first" in truth:
        allocator.allocate(truth["first"], 0)
    reserved = dict(truth["reserved_mib"])
    expected = 0
    for index, (key, num_bytes, stream) in enumerate(drawn(*DRAWN[sequence])):
        if key in blocks:
            allocator.free(blocks.pop(key))
        if num_bytes:
            blocks[key] = allocator.allocate(num_bytes, stream)
        expected = reserved.get(index, expected)
        assert allocator.reserved_bytes == expected * MIB, index
    assert allocator.allocated_bytes == truth["allocated"]
    assert allocator.peak_allocated_bytes == truth["peak_allocated"]
    assert allocator.num_retries == truth.get("retries", 0)
