"""Samples of what a node is busy with: one line in system.<node>.jsonl every `tracking.system_s` seconds.

The first rank of each node reads it by psutil in a thread of its own, which takes a fraction of a millisecond. Names
are those of MLflow's own system metrics, so that its page shows them where its users look: what went over the network
counts from the first reading on.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

MEGABYTE = 1e6


@contextmanager
def sampling_system(
    folder: Path, seconds: float | None, node: str | None = None
) -> Generator[None]:
    """Sample this node inside, and once at the end; `seconds` None samples nothing."""
    if seconds is None:
        yield
        return
    over = threading.Event()
    path = folder / f"system.{node or socket.gethostname()}.jsonl"
    thread = threading.Thread(target=_sample, args=(path, seconds, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _sample(path: Path, seconds: float, over: threading.Event) -> None:
    """Write a line for each reading, the last one when it is over."""
    try:
        psutil.cpu_percent()  # the next call tells of the time since this one
        first, ended = psutil.net_io_counters(), False
        with path.open("a", encoding="utf-8", buffering=1) as lines:
            while not ended:
                ended = over.wait(seconds)
                now, memory = psutil.net_io_counters(), psutil.virtual_memory()
                received, sent = now.bytes_recv, now.bytes_sent
                reading = {
                    "written_at": time.time(),
                    "cpu_utilization_percentage": psutil.cpu_percent(),
                    "system_memory_usage_megabytes": (memory.total - memory.available) / MEGABYTE,
                    "system_memory_usage_percentage": memory.percent,
                    "network_receive_megabytes": (received - first.bytes_recv) / MEGABYTE,
                    "network_transmit_megabytes": (sent - first.bytes_sent) / MEGABYTE,
                    **_gpus(),
                }
                lines.write(json.dumps(reading) + "\n")
    except (OSError, ValueError, LookupError, RuntimeError) as error:  # a full disk, another /proc
        print(f"{path.name} ends here: {error}")


def _gpus() -> dict[str, float]:
    """Return what the GPUs that this rank sees are busy with, all processes together; empty without one.

    Where a site shows each rank its own GPU alone, that is the first of the node's.

    NVML (nvidia-ml-py) tells it without making a context. Where it is not installed, or does not tell, as of a part of
    a GPU, this rank's own GPU tells.
    """
    if not torch.cuda.is_initialized():
        return {}
    cuda: Any = torch.cuda  # which declares few of its types
    readings: dict[str, float] = {}
    try:
        for gpu in range(torch.cuda.device_count()):
            total = cuda.get_device_properties(gpu).total_memory
            readings |= _memory_of_gpu(gpu, cuda.device_memory_used(gpu), total)
            readings[f"gpu_{gpu}_utilization_percentage"] = cuda.utilization(gpu)
    except Exception:  # each library below has errors of its own
        # The first rank of a node, which samples, has the first.
        free, total = cuda.mem_get_info(0)
        readings = _memory_of_gpu(0, total - free, total)
    return readings


def _memory_of_gpu(gpu: int, used: int, total: int) -> dict[str, float]:
    return {
        f"gpu_{gpu}_memory_usage_megabytes": used / MEGABYTE,
        f"gpu_{gpu}_memory_usage_percentage": 100 * used / total,
    }
