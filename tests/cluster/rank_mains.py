"""What ranks do in test_local.py, for real and in forked processes: a run's folder is named after a function here."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

from zeroexp.process import world
from zeroexp.tracking import failure


def prepare(folder: Path) -> None:
    """Everything is imported above."""
    if folder.name == "sleep_in_prepare":
        time.sleep(1000)


def main(folder: Path, *, device: str) -> None:
    globals()[folder.name.partition("-")[0]](folder, device=device)


def say_who(folder: Path, *, device: str) -> None:
    place = world.rank_info_from_environment(os.environ)
    facts = {
        "rank": place.rank,
        "size": place.size,
        "device": device,
        "pid": os.getpid(),
        "server": os.getppid(),
        "threads": threading.active_count(),
    }
    (folder / f"rank{place.rank}.json").write_text(json.dumps(facts))


def write_lines(folder: Path, *, device: str) -> None:
    with (folder / "records.jsonl").open("a", buffering=1) as file:
        for step in range(5):
            file.write(json.dumps({"step": step}) + "\n")
            while not (folder / f"seen{step}").exists():  # by who follows the job while it runs
                time.sleep(0.01)


def meet(folder: Path, *, device: str) -> None:
    with world.joined_process_group(device=device) as here:
        (folder / f"met{here.rank}.json").write_text(json.dumps(world.gather_objects(os.getpid())))


def raise_on_rank_1(folder: Path, *, device: str) -> None:
    rank = world.rank_info_from_environment(os.environ).rank
    _note_pid(folder, rank)
    if rank == 1:
        _wait_for_rank_0(folder)
        try:
            raise ArithmeticError("the loss is not a number")
        except ArithmeticError as error:
            failure.write_raised(folder, rank, error)
            raise SystemExit(1) from error
    _ignore_sigterm_and_hang()


def kill_rank_1(folder: Path, *, device: str) -> None:
    """Rank 0 blames its connection first, as a peer of a killed rank does."""
    rank = world.rank_info_from_environment(os.environ).rank
    if rank == 1:
        _note_pid(folder, rank)
        _wait_for_rank_0(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    failure.write_raised(folder, rank, ConnectionError("Connection closed by peer"))
    hang(folder, device=device)


def exit_silently(folder: Path, *, device: str) -> None:
    os._exit(7)


def hang(folder: Path, *, device: str) -> None:
    _note_pid(folder, world.rank_info_from_environment(os.environ).rank)
    time.sleep(1000)


def kill_server(folder: Path, *, device: str) -> None:
    _note_pid(folder, world.rank_info_from_environment(os.environ).rank)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def _ignore_sigterm_and_hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def _wait_for_rank_0(folder: Path) -> None:
    while not (folder / "pid0").exists():
        time.sleep(0.01)


def _note_pid(folder: Path, rank: int) -> None:
    unfinished = folder / f"unfinished{rank}"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(folder / f"pid{rank}")
