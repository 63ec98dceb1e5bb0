"""Bytes of memory: what a rank's model states hold, and what was allocated meanwhile.

Resident set size tells neither: the C library keeps what was freed, which ranks engines wrongly. So states are counted
by storage, and allocations where torch makes them: by the CUDA caching allocator's own statistics, on the CPU by
`allocator.cpp`, compiled on first use.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from zeroexp.measure.record import KINDS
from zeroexp.strategies.base import ModelStates

SOURCE = Path(__file__).with_name("allocator.cpp")


def bytes_by_kind(states: ModelStates) -> dict[str, int]:
    """Bytes of the storages behind the tensors, each storage once, under the first of KINDS that shows it.

    A view counts as the whole storage it keeps alive; a storage resized to zero counts as nothing; of a DTensor the
    local part counts. `hidden_bytes` belong to the buffers.
    """
    seen: set[int] = set()
    held = {kind: _unseen_bytes(getattr(states, kind), seen) for kind in KINDS}
    held["buffers"] += states.hidden_bytes
    return held


def _unseen_bytes(tensors: Sequence[Tensor], seen: set[int]) -> int:
    num_bytes = 0
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        identity = storage._cdata  # pyright: ignore[reportPrivateUsage]  (the C++ storage's address)
        if identity not in seen:
            seen.add(identity)
            num_bytes += storage.nbytes()
    return num_bytes


def most_held_bytes() -> int:
    """By this process, for the story of a failure: on its GPU since the last step began, else what was resident."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class AllocationMeter:
    """What torch allocated on one device in this process since this meter was made; one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._source = _CudaAllocations(device) if device.type == "cuda" else _installed
        self._before = 0
        if self._source is not None:
            self._source.reset_peak()
            self._before = self._source.total()

    def peak_bytes(self) -> int | None:
        """Most bytes held at once since then, what was held then included; None where nobody counts."""
        return None if self._source is None else self._source.peak()

    def allocated_bytes(self) -> int | None:
        """Sum of all allocations since then, whether freed or not; None where nobody counts."""
        return None if self._source is None else self._source.total() - self._before


class _CudaAllocations:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def total(self) -> int:
        return torch.cuda.memory_stats(self._device)["allocated_bytes.all.allocated"]


class _CpuAllocations:
    """The counters of allocator.cpp, which count from the moment `install` was called in this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.install = _counter(library, "install", None)
        self.reset_peak = _counter(library, "reset_peak", None)
        self.peak = _counter(library, "peak", ctypes.c_int64)
        self.total = _counter(library, "total", ctypes.c_int64)


def _counter(library: ctypes.CDLL, name: str, result: type[ctypes.c_int64] | None):
    function = library[f"zeroexp_{name}"]
    function.argtypes, function.restype = [], result
    return function


_installed: _CpuAllocations | None = None


def count_cpu_allocations() -> str | None:
    """From now on count what torch allocates on the CPU in this process; exact, about 20 ns per allocation.

    Call it before the tensors that should count exist. Returns None, or in one line why nothing can be counted.
    """
    global _installed
    library = compile_allocator()
    if isinstance(library, str):
        return library
    _installed = _CpuAllocations(ctypes.CDLL(str(library)))
    _installed.install()
    return None


def compile_allocator() -> Path | str:
    """The compiled counting allocator, made once per user, torch version and source; or why there is none.

    Safe to call from several processes at once. Creates no thread, so that a process may fork afterwards.
    """
    library = _cache_folder() / f"allocator-{_fingerprint()}.so"
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return "peak memory on the CPU is not counted: no C++ compiler (install g++ or set CXX)"
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        compiled = subprocess.run(_compile(compiler, made), capture_output=True, text=True)
        if compiled.returncode != 0:
            error = compiled.stderr.strip().partition("\n")[0]
            return f"peak memory on the CPU is not counted: {compiler} failed: {error}"
        made.replace(library)
    return library


def _compile(compiler: str, target: Path) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        *(compiler, "-O2", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *("-o", str(target), str(SOURCE)),
        *("-I", str(torch_folder / "include"), "-L", str(torch_folder / "lib"), "-lc10"),
    ]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeroexp"


@functools.cache
def _fingerprint() -> str:
    source = SOURCE.read_bytes() + torch.__version__.encode() + torch.__file__.encode()
    return hashlib.sha256(source).hexdigest()[:16]
