"""The log of what torch allocates: every block with address, size, time and operator, while `logged` is entered.

On the CPU allocator.cpp writes it, on CUDA the caching allocator's own history. Times are those of `time.perf_counter`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from zeroexp.measure.memory import call_allocator

FOREVER = float("inf")
MOST_CUDA_CHANGES = 1_000_000
# Rows of the log as allocator.cpp declares them, field by field.
CHANGE, SPAN = Struct("=qqQii"), Struct("=qqii")


@dataclass(slots=True)
class Allocation:
    began_at: float  # seconds of time.perf_counter
    num_bytes: int
    address: int
    operator: str  # the outermost operator that asked for it; empty where none did
    thread: int  # 0 is the thread that started the log
    ended_at: float = FOREVER
    cause: str = ""  # of record.CAUSES, once causes.py has found it


@dataclass(frozen=True)
class TracedSpan:
    """Something that torch names itself: a collective, a range of one of its engines."""

    name: str
    began_at: float
    ended_at: float
    asynchronous: bool


@dataclass
class Log:
    base_bytes: int  # held when the log began
    blocks: list[Allocation] = field(default_factory=list[Allocation])
    # (when, address, bytes) of blocks from before the log.
    freed: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    spans: list[TracedSpan] = field(default_factory=list[TracedSpan])
    # Of a GPU's caching allocator with its history, as torch's viewer shows it.
    snapshot: dict[str, Any] | None = None

    def add(self, changes: Iterable[tuple[float, int, int, str, int]]) -> None:
        """Add changes (when, bytes, address, operator, thread), in order; bytes are negative where a block ends."""
        live: dict[int, Allocation] = {}
        for when, num_bytes, address, operator, thread in changes:
            if num_bytes > 0:
                live[address] = Allocation(when, num_bytes, address, operator, thread)
                self.blocks.append(live[address])
            elif address in live:
                live.pop(address).ended_at = when
            else:
                self.freed.append((when, address, -num_bytes))


def logging_allocations(device: torch.device) -> AbstractContextManager[Log | None]:
    """Log what is allocated on `device` inside; the log is filled on leaving. Yields None where nothing can log."""
    if device.type == "cuda":
        return _logged_on_cuda(device)
    held = call_allocator("current")
    return nullcontext() if held is None else _logged_on_cpu(Log(held))


def is_counted(tensor: Tensor) -> bool:
    """Tell whether torch's allocator gave the tensor's memory, and not a file that ranks share."""
    if tensor.device.type != "cpu":
        return True
    storage = tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    return call_allocator("counts", storage) != 0  # None: nobody can tell


@contextmanager
def _logged_on_cpu(log: Log) -> Generator[Log]:
    call_allocator("start_log")
    try:
        yield log
    finally:
        call_allocator("stop_log")

    @cache
    def named(number: int) -> str:
        if number < 0:
            return ""
        return call_allocator("name", number, returns=ctypes.c_char_p).decode()

    log.add(
        (nanoseconds / 1e9, num_bytes, address, named(operator), thread)
        for nanoseconds, num_bytes, address, operator, thread in _rows("changes", CHANGE)
    )
    log.spans = [
        TracedSpan(named(operator), began / 1e9, ended / 1e9, bool(asynchronous))
        for began, ended, operator, asynchronous in _rows("spans", SPAN)
    ]


def _rows(what: str, row: Struct) -> Iterable[Any]:
    rows = ctypes.create_string_buffer(row.size * call_allocator(f"num_{what}"))
    call_allocator(f"take_{what}", rows)
    return row.iter_unpack(rows.raw)


@contextmanager
def _logged_on_cuda(device: torch.device) -> Generator[Log]:
    memory: Any = torch.cuda.memory
    # The history tells what was asked for; memory_allocated counts blocks, each rounded up to 512 bytes.
    log = Log(torch.cuda.memory_stats(device)["requested_bytes.all.current"])
    to_perf_counter = time.perf_counter() - time.time()
    memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=MOST_CUDA_CHANGES
    )
    try:
        yield log
    finally:
        snapshot: dict[str, Any] = memory._snapshot(device)
        memory._record_memory_history(None)
    log.snapshot = snapshot
    traces: list[dict[str, Any]] = snapshot["device_traces"][device.index or 0]
    signs = {"alloc": 1, "free_completed": -1}
    log.add(
        (
            each["time_us"] / 1e6 + to_perf_counter,
            signs[each["action"]] * each["size"],
            each["addr"],
            _line_of(each),
            0,
        )
        for each in traces
        if each["action"] in signs
    )


def _line_of(change: dict[str, Any]) -> str:
    """Return the line of Python that allocated, since the history of CUDA names no operator."""
    frames: list[dict[str, Any]] = change.get("frames") or []
    return f"{frames[0]['name']} ({frames[0]['filename']}:{frames[0]['line']})" if frames else ""
