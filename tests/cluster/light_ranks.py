"""Ranks that fail or hang in test_slurm.py and test_local.py.

They import no torch, so that twenty of them start at once on two cores.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path

from tests.run_folders import record
from zeroexp.tracking import attempt, failure
from zeroexp.tracking.files import RecordWriter, read_records
from zeroexp.tracking.json_files import read_json, write_json
from zeroexp.training.agree_to_stop import ASKS_TO_STOP, SAVED, Stop


def hang(folder: Path, *, device: str) -> None:
    _note(folder)
    time.sleep(1000)


def count_until_asked(folder: Path, *, device: str) -> None:
    """Counts from where it stopped last time, in steps of 0.1 s; asked to stop, it saves and leaves, as ranks do."""
    count(folder, enough=False)


def count_until_asked_once(folder: Path, *, device: str) -> None:
    """The same, but its second attempt comes to an end."""
    count(folder, enough=attempt.own_number() != 1)


def count(folder: Path, *, enough: bool) -> None:
    stop, saved, rank = Stop(), folder / "saved.json", _note(folder)
    stop.listen(*ASKS_TO_STOP)
    first = last = (read_json(saved) or {"count": 0})["count"]
    while not stop.asked and not (enough and last >= first + 5):
        time.sleep(0.1)
        last += 1
    write_json(
        folder / f"attempt{attempt.own_number()}-{rank}.json", {"first": first, "last": last}
    )
    if rank == 0:
        write_json(saved if stop.asked else folder / "summary.json", {"count": last})
    raise SystemExit(SAVED if stop.asked else 0)


def outlive_its_node(folder: Path, *, device: str) -> None:
    """Rank 0 writes records that hold its attempt as their loss, from where they end; the other hears of nothing.

    The first attempt goes on for ever, the second until the first is gone.
    """
    rank, number, step = _note(folder), attempt.own_number() or 0, len(read_records(folder))
    write_json(folder / f"attempt{number}-{rank}.json", {"pid": os.getpid()})
    if rank != 0:
        time.sleep(1000 if number == 1 else 0)
        return
    try:
        with RecordWriter(folder, from_step=step) as writer:
            alone = False
            while not alone:  # the first may be gone already: the second writes once all the same
                writer.write(record(step, loss=float(number)))
                step += 1
                time.sleep(0.1)
                alone = number > 1 and not any(_lives(folder, rank) for rank in (0, 1))
    except attempt.Superseded as refusal:
        write_json(folder / f"refused{number}.json", {"words": str(refusal)})
        failure.write_raised(folder, rank, refusal)
        raise SystemExit(1) from refusal
    write_json(folder / "summary.json", {"num_steps": step})


def _lives(folder: Path, rank: int) -> bool:
    """A rank of the first attempt. Nodes of a minicluster share their process numbers."""
    pid = (read_json(folder / f"attempt1-{rank}.json") or {})["pid"]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def fill_the_disk(folder: Path, *, device: str) -> None:
    rank = _note(folder)
    try:
        with RecordWriter(folder) as writer:
            for step in range(1 << 20):
                writer.write(record(step))
    except OSError as error:
        failure.write_raised(folder, rank, error)
        raise SystemExit(1) from error


def note_gpus(folder: Path, *, device: str) -> None:
    """What Slurm gave, and what the rank is told to run on."""
    rank = _note(folder)
    given = {"device": device, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
    write_json(folder / f"gpus{rank}.json", given)
    write_json(folder / "summary.json", given)


def note_place(folder: Path, *, device: str) -> None:
    """Where it may run, and what it inherited of Slurm's variables."""
    rank = _note(folder)
    found = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
    place = {"cpus": sorted(os.sched_getaffinity(0)), "variables": found}
    place["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    write_json(folder / f"place{rank}.json", place)
    write_json(folder / "summary.json", {"num_steps": 0})


def raise_on_rank_1(folder: Path, *, device: str) -> None:
    """The other hangs, deaf to SIGTERM."""
    if _note(folder) == 1:
        _wait_for_rank_0(folder)
        error = ArithmeticError("the loss is not a number")
        failure.write_raised(folder, 1, error)
        raise SystemExit(1) from error
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def kill_rank_1(folder: Path, *, device: str) -> None:
    """Rank 0 blames its connection first, as the peer of a killed rank does."""
    if _note(folder) == 1:
        _wait_for_rank_0(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    failure.write_raised(folder, 0, ConnectionError("Connection closed by peer"))
    time.sleep(1000)


def ask_for_too_much(folder: Path, *, device: str) -> None:
    rank, most = _note(folder), 1 << 30
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        bytearray(most)
    except MemoryError as error:
        failure.write_raised(folder, rank, error)
        raise SystemExit(1) from error


def leave_a_thread(folder: Path, *, device: str) -> None:
    """One that the interpreter would wait for, or kill, at its end."""
    threading.Thread(target=time.sleep, args=(1000,)).start()


def exit_silently(folder: Path, *, device: str) -> None:
    os._exit(7)


def _note(folder: Path) -> int:
    """Leave this process and its parent in the folder; return the rank."""
    rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
    for what, pid in (("task", os.getppid()), ("pid", os.getpid())):
        unfinished = folder / f"unfinished-{what}{rank}"
        unfinished.write_text(str(pid))
        unfinished.rename(folder / f"{what}{rank}")
    return int(rank)


def _wait_for_rank_0(folder: Path) -> None:
    while not (folder / "pid0").exists():
        time.sleep(0.01)
