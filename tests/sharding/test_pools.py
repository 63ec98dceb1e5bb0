"""Memory of gathered parameters: leased by one at a time, given back to the allocator for real."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from zeroexp.comm.gather_memory import Allocated, Mapped
from zeroexp.comm.paging import PAGE_BYTES, pages
from zeroexp.cut.chunk import Chunk, Member
from zeroexp.sharding.pools import Pool, PrivateStore

CPU = torch.device("cpu")


def storage_bytes(store: Pool | PrivateStore) -> int:
    return store.memory.untyped_storage().nbytes()


def make_pool(num_bytes: int) -> Pool:
    chunk = Chunk((Member("a", 0, num_bytes),), (0, num_bytes))
    return Pool(Allocated([[(chunk, torch.empty(0, dtype=torch.uint8))]], CPU))


def test_a_pool_has_one_tenant_at_a_time():
    pool = make_pool(64)
    assert pool.is_free
    pool.lease("block 0")
    assert not pool.is_free
    pool.lease("block 0")  # the tenant may ask again
    with pytest.raises(RuntimeError, match="leased to block 0, block 2 can not have it"):
        pool.lease("block 2")
    pool.release(forget=False)
    pool.lease("block 2")
    assert pool.tenant == "block 2"


def test_a_file_of_a_pool_is_closed_with_it():
    chunk = Chunk((Member("a", 0, 5000),), (0, 2500, 5000))
    piece = torch.empty(2500, dtype=torch.uint8)
    memory = Mapped([[(chunk, piece)]], 0, PAGE_BYTES, lambda tensor: (-1, 0))
    pool = Pool(memory)
    file = memory._file
    assert os.fstat(file).st_size == pool.memory.nbytes == pages(5000)
    del pool, memory
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(file)


@pytest.mark.parametrize("make", [make_pool, lambda num_bytes: PrivateStore(num_bytes, CPU)])
def test_values_are_remembered_until_they_are_forgotten(make):
    store = make(64)
    store.lease("block 0")
    store.valid_for = "block 0"
    store.release(forget=False)
    assert (store.is_free, store.valid_for) == (True, "block 0")
    store.lease("block 0")
    store.release(forget=True)
    assert (store.is_free, store.valid_for) == (True, None)


def test_a_pool_keeps_its_memory():
    pool = make_pool(640)
    pool.lease("block 0")
    pool.release(forget=True)
    assert storage_bytes(pool) == 640


def test_private_memory_is_given_back_and_comes_back_under_the_same_views():
    store = PrivateStore(640, CPU)
    view = store.memory[:40].view(torch.float32)
    storage = store.memory.untyped_storage()._cdata
    store.lease("root")
    store.valid_for = "root"
    store.release(forget=False)
    assert storage_bytes(store) == 640, "values that are still wanted stay"
    store.release(forget=True)
    assert storage_bytes(store) == 0
    store.lease("root")
    assert storage_bytes(store) == 640
    assert store.memory.untyped_storage()._cdata == storage, "resized, never replaced"
    store.memory.zero_()
    view.fill_(1.5)
    assert store.memory[:40].view(torch.float32).tolist() == [1.5] * 10
    assert view.untyped_storage()._cdata == storage
