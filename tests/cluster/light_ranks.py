"""Ranks that fail or hang in test_slurm.py. They import no torch, so that twenty of them start at once on two cores."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from zeroexp.stop import SAVED, Stop
from zeroexp.tracking import failure
from zeroexp.tracking.json_files import read_json, write_json


def hang(folder: Path, *, device: str) -> None:
    _note(folder)
    time.sleep(1000)


def count_until_asked(folder: Path, *, device: str) -> None:
    """Counts from where it stopped last time, in steps of 0.1 s; asked to stop, it saves and leaves, as ranks do."""
    stop, saved = Stop(), folder / "saved.json"
    stop.listen(signal.SIGUSR2, signal.SIGTERM)
    rank, attempt = _note(folder), os.environ["ZEROEXP_ATTEMPT"]
    first = count = (read_json(saved) or {"count": 0})["count"]
    while not stop.asked and not (folder / "enough").exists():
        time.sleep(0.1)
        count += 1
    write_json(folder / f"attempt{attempt}-{rank}.json", {"first": first, "last": count})
    if rank == 0:
        write_json(saved if stop.asked else folder / "summary.json", {"count": count})
    raise SystemExit(SAVED if stop.asked else 0)


def note_gpus(folder: Path, *, device: str) -> None:
    """What Slurm gave, and what the rank is told to run on."""
    rank = _note(folder)
    given = {"device": device, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
    write_json(folder / f"gpus{rank}.json", given)
    write_json(folder / "summary.json", given)


def raise_on_rank_1(folder: Path, *, device: str) -> None:
    """The other hangs, deaf to SIGTERM."""
    if _note(folder) == 1:
        error = ArithmeticError("the loss is not a number")
        failure.write_raised(folder, 1, error)
        raise SystemExit(1) from error
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def kill_rank_1(folder: Path, *, device: str) -> None:
    """Rank 0 blames its connection first, as the peer of a killed rank does."""
    if _note(folder) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failure.write_raised(folder, 0, ConnectionError("Connection closed by peer"))
    time.sleep(1000)


def exit_silently(folder: Path, *, device: str) -> None:
    os._exit(7)


def _note(folder: Path) -> int:
    """Leave this process and its task in the folder; returns the rank."""
    rank = int(os.environ["SLURM_PROCID"])
    (folder / f"task{rank}").write_text(str(os.getppid()))
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    return rank
