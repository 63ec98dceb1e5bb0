"""Real runs of configured points: forked ranks of this machine that do all that a rank of a sweep does."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from zeroexp.config import keys as configs
from zeroexp.config.keys import Config
from zeroexp.measure.record import RunSummary
from zeroexp.plan.__main__ import composed_points
from zeroexp.run import rank
from zeroexp.tracking.files import read_records, read_summary

Found = TypeVar("Found")

SECONDS = 120.0  # after which a run counts as hung


def config_of(words: str) -> Config:
    """Return the one point of these words, on CPUs."""
    (point,) = composed_points([*words.split(), "cluster.device=cpu"]).points
    if point.refusal:
        raise ValueError(f"{words}: {point.refusal}")
    return point.config


def summary_of(config: Config) -> RunSummary:
    """Train; return what the run says of itself. Raises RuntimeError if a rank died."""
    return _trained(config, read_summary)


def step_seconds_of(config: Config) -> list[float]:
    """Train; return the seconds of each measured step. Raises RuntimeError if a rank died."""
    records = _trained(config, read_records)
    return [each.step_seconds for each in records if not each.warmup]


def peak_and_steps_of(
    config: Config, prepare: Callable[[], object] = lambda: None
) -> tuple[float, list[float]]:
    """Train; return the most bytes of the fullest rank, and the seconds of each measured step."""
    summary, records = _trained(config, lambda run: (read_summary(run), read_records(run)), prepare)
    if summary is None or summary.memory.peak is None:
        raise RuntimeError("allocations can not be counted here")
    return summary.memory.peak.fullest, [each.step_seconds for each in records if not each.warmup]


def before_others() -> None:
    """Have this process run before all others of the machine, until it waits. The system may refuse it."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _trained(
    config: Config,
    read: Callable[[Path], Found | None],
    prepare: Callable[[], object] = lambda: None,
) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "sweep" / "run"
        ended_well = trains(config, run, prepare)
        found = read(run)
    if not ended_well or not found:
        raise RuntimeError(f"{config.strategy.name} of {config.model.name}: a rank died, see above")
    return found


def trains(config: Config, run: Path, prepare: Callable[[], object] = lambda: None) -> bool:
    """Train in the folder `run`; return whether no rank died. Each rank calls `prepare` before it begins."""
    run.mkdir(parents=True)
    configs.save(config, run / "config.yaml")
    port = _free_port()
    size = config.world_size
    return _all_end_well([_fork(run, index, size, port, prepare) for index in range(size)])


def _fork(run: Path, index: int, size: int, port: int, prepare: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        prepare()
        place = {"RANK": index, "WORLD_SIZE": size, "LOCAL_RANK": index, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        rank.main(run, device="cpu")
        code = 0
    finally:
        os._exit(code)


def _all_end_well(ranks: Sequence[int]) -> bool:
    """Wait for all ranks; once one dies, end the others, which would wait for it."""
    left, well, deadline = set(ranks), True, time.monotonic() + SECONDS
    while left:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.remove(pid)
                well = well and status == 0
        if not well or time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return False
        time.sleep(0.02)
    return well


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
