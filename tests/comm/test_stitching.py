"""What a rank owns is mapped into what it gathers: the same memory under two addresses, held once."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from zeroexp.comm import direct, stitching
from zeroexp.comm.paging import PAGE_BYTES, rounding_to_pages
from zeroexp.comm.sizes import mapped_bytes
from zeroexp.comm.stitching import Stretch, stitch
from zeroexp.cut.stage import STAGES
from zeroexp.process.world import World, barrier
from zeroexp.sharding.engine import Sharded
from zeroexp.sharding.options import Options

WIDTH = 1000  # a million elements and a thousand: no whole pages by themselves, large for up to three ranks


FILE_NAME = "stitched-in-a-test"


def open_file(fill: int) -> int:
    file = os.memfd_create(FILE_NAME)
    os.write(file, bytes([fill]) * 3 * PAGE_BYTES)
    return file


def mappings() -> int:
    """The stretches of these files alone: threads of libraries map and free memory of their own at any time."""
    return sum(
        f"/memfd:{FILE_NAME}" in line
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    )


def test_two_files_under_one_range_of_addresses():
    one, two = open_file(1), open_file(2)
    memory = stitch(
        [
            Stretch(one, PAGE_BYTES, PAGE_BYTES),
            Stretch(two, 0, 2 * PAGE_BYTES),
            Stretch(one, 0, PAGE_BYTES),
        ]
    )
    assert mappings() == 3
    assert memory.view(4, PAGE_BYTES)[:, 7].tolist() == [1, 2, 2, 1]
    memory[0] = 9
    memory[PAGE_BYTES] = 8
    assert os.pread(one, 1, PAGE_BYTES) == b"\x09" and os.pread(two, 1, 0) == b"\x08"
    os.close(one)
    os.close(two)
    assert memory.sum() == 9 + 8 - 3 + PAGE_BYTES * (1 + 2 + 2 + 1)
    del memory
    gc.collect()
    assert mappings() == 0


def test_what_can_not_be_mapped_says_so():
    with pytest.raises(OSError, match=f"mmap of {PAGE_BYTES} bytes: Bad file descriptor"):
        stitch([Stretch(-1, 0, PAGE_BYTES)])


def large_engine(world: World, stage: str, transport: str, width: int = WIDTH) -> Sharded:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    return Sharded(
        module,
        blocks=["0", "1", "2"],
        stage=STAGES[stage],
        param_groups=[{"params": list(module.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.01),
        world=world,
        options=Options(transport=transport),
    )


def weights_after(strategy: Sharded, world: World, num_steps: int) -> list[torch.Tensor]:
    """Every rank's pieces of the canonical weights, after steps on inputs of its own."""
    width = next(strategy.model.children()).in_features
    inputs = torch.randn(4, width, generator=torch.Generator().manual_seed(world.rank))
    for _ in range(num_steps):
        with strategy.microbatch(last=True):
            strategy.backward(strategy.model(inputs).square().mean())
        strategy.step()
        strategy.zero_grad()
    strategy.drain()
    state = strategy.state_dict()
    return [piece.tensor.clone() for t in state.values() for piece in t["weight"].pieces]


def compare_with_messages(world: World) -> None:
    """Bit for bit what ranks that copy everything get; and a pool without the sections that are mapped."""
    mapped, copied = (large_engine(world, "zero3", transport) for transport in ("direct", "gloo"))
    ours = weights_after(mapped, world, 3)
    for got, expected in zip(ours, weights_after(copied, world, 3), strict=True):
        assert torch.equal(got, expected)
    blocks = mapped.units[1:]
    for unit in blocks:
        (tensors,), (part,) = unit.chunks, unit.gather_parts()
        assert part.in_place
        assert tensors.chunk.cuts[1] >= rounding_to_pages(PAGE_BYTES).threshold
        unit.store.release(forget=True)
        unit.gather().wait()
        unit.show_gathered()
        own = tensors.full[tensors.chunk.section(world.rank)]
        assert own.data_ptr() != tensors.piece.data_ptr() and torch.equal(own, tensors.piece)
        tensors.piece[5] = 77.0
        assert own[5] == 77.0
        unit.free(forget=True)
    (pool,) = mapped.pools
    form = max(mapped_bytes([t.chunk for t in u.chunks], world.rank, 4) for u in blocks)
    numel = WIDTH * WIDTH + WIDTH
    most = 4 * numel * (world.size - 1) // world.size
    assert pool.memory.nbytes == form
    assert most <= form <= most + (world.size + 1) * 2 * PAGE_BYTES
    assert mapped.wire.held_shared_bytes >= form + sum(
        t.piece.nbytes for u in blocks for t in u.chunks
    )
    barrier()  # no rank closes its connections while another still reads


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_own_section_is_neither_copied_nor_held_twice(ranks, world_size):
    ranks(compare_with_messages, world_size=world_size)


def test_a_place_beyond_two_gibibytes_is_not_cut():
    """A sparse file with one written page at 5 GiB."""
    far = 5 << 30
    file = os.memfd_create(FILE_NAME)
    os.ftruncate(file, far + PAGE_BYTES)
    os.pwrite(file, b"\x05", far)
    memory = stitch([Stretch(file, far, PAGE_BYTES)])
    os.close(file)
    assert memory[0] == 5


def train_with_pages(world: World, page_bytes: int, width: int) -> list[tuple[int, int]]:
    """As many mappings as with the machine's pages, each what a kernel of such pages allows, and the same weights."""
    asked: list[tuple[int, int]] = []
    machine_pages, machine_map = direct.PAGE_BYTES, stitching._map

    def watched(address, num_bytes, protection, flags, file, offset):
        asked.append((num_bytes, offset))
        return machine_map(address, num_bytes, protection, flags, file, offset)

    direct.PAGE_BYTES, stitching._map = page_bytes, watched
    try:
        strategy, copied = (large_engine(world, "zero3", t, width) for t in ("direct", "gloo"))
    finally:
        direct.PAGE_BYTES, stitching._map = machine_pages, machine_map
    expected = weights_after(copied, world, 2)
    for got, other in zip(weights_after(strategy, world, 2), expected, strict=True):
        assert torch.equal(got, other)
    in_place = [part.in_place for unit in strategy.units[1:] for part in unit.gather_parts()]
    assert in_place == [True] * 3
    barrier()
    return asked


@pytest.mark.parametrize(
    ("page_kib", "width"), [(16, 1500), pytest.param(64, 2950, marks=pytest.mark.slow)]
)
def test_on_a_kernel_of_larger_pages_every_mapping_is_allowed(ranks, page_kib, width):
    for asked in ranks(train_with_pages, page_kib << 10, width):
        assert len(asked) > 6
        assert [a for a in asked if a[0] % (page_kib << 10) or a[1] % (page_kib << 10)] == []
