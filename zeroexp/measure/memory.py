"""Bytes of memory: what a rank's model states hold, and what torch allocated during a step.

Resident set size shows neither: the C library keeps freed memory, so engines would be ranked wrongly. So states are
counted by storage, and allocations where torch makes them: on CUDA by the caching allocator's own statistics, on the
CPU by `allocator.cpp`, which is compiled on first use.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import shlex
import shutil
import stat
import subprocess
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from zeroexp.config.cache_folder import cache_root
from zeroexp.config.keys import ConfigError
from zeroexp.interface.strategy import ModelStates
from zeroexp.measure.record import FILES, HOST, KINDS, OUTER, RESIDENT
from zeroexp.process.locks import temporary_folder

SOURCE = Path(__file__).with_name("allocator.cpp")
NOT_COUNTED = "peak memory on the CPU is not counted: {}"
REMEDY = "set ZEROEXP_CACHE to a folder that is yours"


def bytes_by_kind(states: ModelStates) -> dict[str, int]:
    """Return the bytes of the storages behind the tensors, by kind.

    A view counts as the whole storage it keeps alive, a storage resized to zero as nothing, and a DTensor as its local
    part. `hidden_bytes` count as buffers. HOST is there where an engine keeps states on the host, FILES where
    these lie in files, and RESIDENT where these are real ones.
    """
    off_device = [kind for kind in (FILES, HOST) if getattr(states, kind) is not None]
    kinds = (*KINDS, *([OUTER] if states.outer else []), *off_device)
    held = dict.fromkeys(kinds, 0)
    for kind, tensor in storages_by_kind(states, kinds):
        held[kind] += tensor.untyped_storage().nbytes()
    held["buffers"] += states.hidden_bytes
    if states.resident_bytes is not None:
        held[RESIDENT] = states.resident_bytes
    return held


def storages_by_kind(states: ModelStates, kinds: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield each storage once, by a tensor in it, under the first of these kinds that shows it."""
    seen: set[UntypedStorage] = set()
    for kind in kinds:
        for tensor in map(local_tensor, getattr(states, kind)):
            if (storage := tensor.untyped_storage()) not in seen:
                seen.add(storage)
                yield kind, tensor


def local_tensor(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor itself."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def most_held_bytes() -> int:
    """Return the most bytes this process held, for the report of a failure.

    With a GPU these are bytes allocated there since the last step began, else the peak of resident memory.
    """
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class AllocationMeter:
    """Counts what torch allocates on one device in this process from now on. Only one meter works at a time.

    Each of its numbers is None where nothing counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_cuda = device, device.type == "cuda"
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        else:
            call_allocator("reset_peak")
        self._before = self._total() or 0

    def peak_bytes(self) -> int | None:
        """Return the most bytes held at once since the meter was made, older ones included."""
        if self._on_cuda:
            return torch.cuda.max_memory_allocated(self._device)
        return call_allocator("peak")

    def host_peak_bytes(self) -> int | None:
        """Return the most bytes held at once of what was allocated `on_host`; None if nothing was, or on a GPU."""
        return None if self._on_cuda else call_allocator("host_peak") or None

    def total_allocated_bytes(self) -> int | None:
        """Return the sum of all allocations since the meter was made, freed or not."""
        total = self._total()
        return None if total is None else total - self._before

    def _total(self) -> int | None:
        if self._on_cuda:
            return torch.cuda.memory_stats(self._device)["allocated_bytes.all.allocated"]
        return call_allocator("total")


class HostAllocations:
    """What is allocated inside of `entered` is memory of the host, and not of the device that a CPU plays beside it.

    On a GPU the device of a tensor says as much, and nothing is counted here.
    """

    def __init__(self) -> None:
        self.is_entered = False

    @contextmanager
    def entered(self) -> Generator[None]:
        before, self.is_entered = self.is_entered, True
        call_allocator("on_host", True)
        try:
            yield
        finally:
            self.is_entered = before
            call_allocator("on_host", before)


on_host = HostAllocations()  # of this process, whose engines allocate in one thread


_library: ctypes.CDLL | None = None  # of allocator.cpp, where it counts in this process


def call_allocator(name: str, *arguments: Any, returns: Any = ctypes.c_int64) -> Any:
    """Call a function of allocator.cpp, by its name there without prefix; None where nothing counts in this process."""
    if _library is None:
        return None
    function = _library[f"zeroexp_{name}"]
    function.restype = returns
    return function(*(ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments))


def count_cpu_allocations() -> str | None:
    """Start to count what torch allocates on the CPU in this process, exactly and at about 20 ns per allocation.

    Call it before the tensors exist that should count. Returns None, or one line that tells why it can not count.
    """
    global _library
    library = compile_allocator()
    if isinstance(library, str):
        return library
    try:
        _library = ctypes.CDLL(str(library))
    except OSError as error:  # a cache on a disk from which no code may run
        return NOT_COUNTED.format(f"{error}; {REMEDY}")
    call_allocator("install")
    return None


def compile_allocator() -> Path | str:
    """Return the compiled counting allocator, or one line that tells why there is none.

    It is compiled once per user, torch version and source, and again where its file is damaged or could be another
    user's. Several processes may call this at once. It creates no thread, so that the process may fork afterwards.
    """
    try:
        return _compiled_allocator()
    except OSError as error:  # a cache that takes no file
        return NOT_COUNTED.format(f"{error}; {REMEDY}")
    except ConfigError as error:  # a user without a home
        return NOT_COUNTED.format(error)


def _compiled_allocator() -> Path | str:
    folder = _cache_folder()
    made_from = SOURCE.read_bytes() + torch.__version__.encode() + torch.__file__.encode()
    begin = f"allocator-{_digest(made_from)}-"
    for library in folder.glob(f"{begin}*.so"):
        if _is_ours(library) and library.name == f"{begin}{_digest(library.read_bytes())}.so":
            return library
    compiler = list[str]()
    with suppress(ValueError):  # a quote without its other one
        compiler = shlex.split(os.environ.get("CXX", "g++"))  # as "ccache g++"
    if not compiler or shutil.which(compiler[0]) is None:
        return NOT_COUNTED.format("no C++ compiler (install g++ or set CXX)")
    with temporary_folder(folder) as beside:
        made = beside / "allocator.so"
        compiled = subprocess.run(
            _compile(compiler, made), capture_output=True, encoding="utf-8", errors="replace"
        )
        if compiled.returncode != 0:
            error = compiled.stderr.strip().partition("\n")[0]
            return NOT_COUNTED.format(f"{shlex.join(compiler)} failed: {error}")
        made.chmod(0o700)  # the umask may let a group write
        return made.replace(folder / f"{begin}{_digest(made.read_bytes())}.so")


def _compile(compiler: list[str], target: Path) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    return [
        *(*compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-o", str(target), str(SOURCE)),
        *("-I", str(torch_folder / "include"), "-L", str(torch_folder / "lib"), "-lc10"),
        "-ltorch_cpu",
    ]


def _cache_folder() -> Path:
    """Return this user's folder of compiled libraries, in a cache that several may share.

    Raises OSError for one whose content another user may have chosen.
    """
    folder = cache_root() / f"allocator-{os.geteuid()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(folder):
        raise OSError(f"{folder} is another user's, or others may write there")
    return folder


def _is_ours(path: Path) -> bool:
    """Whether nobody but this user and root can have written what is there."""
    status = path.lstat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
