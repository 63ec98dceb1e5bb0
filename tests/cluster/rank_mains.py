"""What ranks do in test_local.py, for real and in forked processes.

A run's folder is named after a function here or in light_ranks.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from tests.cluster import light_ranks
from tests.cluster.light_ranks import _note
from zeroexp.process import world


def prepare(folder: Path) -> None:
    """Everything is imported above."""
    if folder.name == "sleep_in_prepare":
        time.sleep(1000)


def main(folder: Path, *, device: str) -> None:
    what = folder.name.partition("-")[0]
    (globals().get(what) or getattr(light_ranks, what))(folder, device=device)


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


def end_on_node(folder: Path, *, device: str) -> None:
    """End, when this rank has said in which network namespace it is."""
    with world.joined_process_group(device=device) as here:
        (folder / f"node{here.rank}").write_text(os.readlink("/proc/self/ns/net"))
        world.barrier()


def hang_with_child(folder: Path, *, device: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    (folder / f"child{child.pid}").write_text(str(child.pid))
    light_ranks.hang(folder, device=device)


def kill_rank_with_child(folder: Path, *, device: str) -> None:
    if world.rank_info_from_environment(os.environ).rank == 1:
        child = subprocess.Popen(["sleep", "1000"])
        (folder / f"child{child.pid}").write_text(str(child.pid))
    light_ranks.kill_rank_1(folder, device=device)


def kill_on_node(folder: Path, *, device: str) -> None:
    end_on_node(folder, device=device)
    kill_server(folder, device=device)


def kill_server(folder: Path, *, device: str) -> None:
    _note(folder)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
