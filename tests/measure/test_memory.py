"""Bytes against arithmetic: what model states hold, and what the counting allocator saw."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from zeroexp.interface.strategy import ModelStates
from zeroexp.measure.memory import (
    AllocationMeter,
    bytes_by_kind,
    call_allocator,
    compile_allocator,
    count_cpu_allocations,
)

CPU = torch.device("cpu")


@pytest.fixture
def meter() -> AllocationMeter:
    assert count_cpu_allocations() is None
    return AllocationMeter(CPU)


def test_every_storage_counts_once_under_the_first_kind_that_shows_it():
    flat = torch.zeros(100)
    states = ModelStates(
        parameters=[flat[:40].view(4, 10), flat[40:], torch.nn.Parameter(torch.zeros(3))],
        gradients=[torch.zeros(7, dtype=torch.bfloat16)],
        master=[flat[:50]],  # a master of the same dtype aliases its parameters
        optimizer=[torch.zeros(5), torch.zeros(5)],
        secondary=[torch.zeros(9)],
        buffers=[torch.zeros(11, dtype=torch.uint8)],
        hidden_bytes=1000,
    )
    assert bytes_by_kind(states) == {
        "parameters": 400 + 12,
        "gradients": 14,
        "optimizer": 20 + 20,
        "master": 0,
        "secondary": 36,
        "buffers": 11 + 1000,
    }


def test_a_view_counts_as_all_it_keeps_alive():
    assert bytes_by_kind(ModelStates(gradients=[torch.zeros(1000)[:1]]))["gradients"] == 4000


def test_what_is_freed_counts_as_nothing():
    gathered = torch.zeros(1000)
    views = [gathered[:10], gathered[10:]]
    gathered.untyped_storage().resize_(0)
    assert bytes_by_kind(ModelStates(buffers=views))["buffers"] == 0


def test_of_a_dtensor_the_local_part_counts():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = DeviceMesh("cpu", list(range(4)))
        sharded = DTensor.from_local(torch.zeros(25, 8), mesh, [Shard(0)])
        assert sharded.numel() == 4 * 25 * 8
        assert bytes_by_kind(ModelStates(parameters=[sharded]))["parameters"] == 25 * 8 * 4
    finally:
        torch.distributed.destroy_process_group()


def test_peak_and_total_equal_arithmetic(meter):
    before = meter.peak_bytes()  # what earlier tests hold
    kept = torch.empty(1000)  # 4000
    passing = torch.empty(500, dtype=torch.float64)  # + 4000 = 8000 at once
    del passing
    view = kept[10:20]  # nothing
    small = torch.empty(3, dtype=torch.uint8)  # + 3
    assert meter.peak_bytes() - before == 8000
    assert meter.total_allocated_bytes() == 8003
    later = AllocationMeter(CPU)
    assert later.peak_bytes() - before == 4003
    assert later.total_allocated_bytes() == 0
    del kept, view, small
    assert AllocationMeter(CPU).peak_bytes() == before


def test_resizing_a_storage_gives_back_and_takes_again(meter):
    before = meter.peak_bytes()
    tensor = torch.empty(1000)
    tensor.untyped_storage().resize_(0)
    assert AllocationMeter(CPU).peak_bytes() == before
    tensor.untyped_storage().resize_(2000)
    assert AllocationMeter(CPU).peak_bytes() == before + 2000


def test_threads_are_counted(meter):
    before = meter.peak_bytes()
    kept: list[torch.Tensor] = []

    def allocate() -> None:
        for _ in range(1000):
            torch.empty(100)
        kept.append(torch.empty(50))

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.total_allocated_bytes() == 4 * (1000 * 400 + 200)
    assert AllocationMeter(CPU).peak_bytes() == before + 4 * 200


def test_backward_is_counted(meter):
    weight = torch.ones(64, 32, requires_grad=True)  # 8192
    loss = weight.exp().sum()  # 8192 and 4
    before_backward = meter.total_allocated_bytes()
    assert before_backward == 8192 + 8192 + 4
    loss.backward()
    assert weight.grad is not None
    # 4 for the gradient of the loss, of which that of the sum is a view; 8192 for the weight's
    assert meter.total_allocated_bytes() - before_backward == 4 + 8192


def test_an_allocation_beyond_the_limit_raises_and_what_was_held_stays():
    assert count_cpu_allocations() is None
    try:
        call_allocator("limit", 1 << 30)
        held = torch.ones(1 << 20)
        call_allocator("limit", 1 << 21)
        with pytest.raises(torch.OutOfMemoryError, match="exceeds the limit of 2097152"):
            torch.ones(1 << 20)
    finally:
        call_allocator("limit", 2**62)
    assert float(held.sum()) == 1 << 20
    assert torch.ones(1 << 20).numel() == 1 << 20


@pytest.mark.parametrize("compiler", ["no-such-compiler", 'g++ "'])
def test_without_a_compiler_a_line_says_why(monkeypatch, tmp_path, compiler):
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    reason = count_cpu_allocations()
    assert reason is not None and "no C++ compiler" in reason and "\n" not in reason


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    reason = compile_allocator()
    assert isinstance(reason, str) and "false failed" in reason


def test_a_cache_that_takes_no_file_costs_the_count_alone(monkeypatch):
    monkeypatch.setenv("ZEROEXP_CACHE", "/proc/1/mine")
    reason = count_cpu_allocations()
    assert reason is not None and "/proc/1/mine" in reason and "set ZEROEXP_CACHE" in reason


def test_a_user_without_a_home_is_not_counted(monkeypatch):
    for variable in ("ZEROEXP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "~")
    reason = count_cpu_allocations()
    assert reason is not None and reason.count("ZEROEXP_CACHE") == 1 and "has no home" in reason


def test_the_cache_of_data_holds_the_library_too(monkeypatch, tmp_path):
    """A home that is full or read-only needs one variable, not two."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/1/mine")
    assert compiled_by(monkeypatch, tmp_path, "ours").parent.parent == tmp_path


# Writes the file behind -o once two of them are at work, or after a minute in which no second one came.
COMPILER = """#!/bin/sh
touch "$AT_WORK/$$"
for turn in $(seq 1200); do [ "$(ls "$AT_WORK" | wc -l)" -gt 1 ] && break; sleep 0.05; done
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


def test_several_may_compile_at_once(monkeypatch, tmp_path):
    compiler, at_work = tmp_path / "compiler", tmp_path / "at_work"
    at_work.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", f"env {compiler}")
    monkeypatch.setenv("AT_WORK", str(at_work))
    with ThreadPoolExecutor(2) as both:
        made = {compiled.result() for compiled in [both.submit(compile_allocator) for _ in "ab"]}
    assert list((tmp_path / f"allocator-{os.geteuid()}").iterdir()) == list(made)


def compiled_by(monkeypatch, tmp_path, content: str) -> Path:
    """What `compile_allocator` returns where the compiler writes `content`."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho {content} > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    library = compile_allocator()
    assert isinstance(library, Path), library
    return library


def test_a_library_of_another_user_is_never_loaded(monkeypatch, tmp_path):
    """Nor one that a group may write, whoever owns it; where the folder is not ours, nothing is counted."""
    umask = os.umask(0o002)
    try:
        library = compiled_by(monkeypatch, tmp_path, "ours")
        folder = library.parent
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(library.stat().st_mode) == 0o700
        library.chmod(0o720)
        assert stat.S_IMODE(compiled_by(monkeypatch, tmp_path, "ours").stat().st_mode) == 0o700
        folder.chmod(0o770)
        reason = count_cpu_allocations()
    finally:
        os.umask(umask)
    assert reason == (
        f"peak memory on the CPU is not counted: {folder} is another user's, or others may write "
        "there; set ZEROEXP_CACHE to a folder that is yours"
    )
    if os.geteuid() == 0:  # only root can give a file away
        folder.chmod(0o700)
        os.chown(library, 1, -1)
        assert compiled_by(monkeypatch, tmp_path, "ours").stat().st_uid == 0
        os.chown(folder, 1, -1)
        assert "another user's" in str(compile_allocator())


def test_a_damaged_library_is_compiled_again(monkeypatch, tmp_path):
    """Loaded, one of zeros or cut short raises or ends the process. What no one can load costs the count alone."""
    library = compiled_by(monkeypatch, tmp_path, "whole")
    for damaged in (b"", b"wh", bytes(6)):
        library.write_bytes(damaged)
        assert compiled_by(monkeypatch, tmp_path, "whole").read_bytes() == b"whole\n"
    reason = count_cpu_allocations()
    assert reason is not None and "not counted: " in reason and library.name in reason
