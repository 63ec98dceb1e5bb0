"""python -m benchmarks.checkpoints: what a checkpoint costs, ours beside torch's; outputs/bench/checkpoints.json.

--only NAME [...]   comparisons by name (--list prints them)
--rounds N          instead of each comparison's own number
--write FILE        the page whose section is replaced; every row goes into benchmarks/measured/

Two ranks on the CPU save and load in turn, way after way, in an order drawn anew for each round. Everybody's files are
synced to the disk before a save counts as whole; loading finds them in the page cache, whoever wrote them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

from benchmarks import table
from benchmarks.checkpoint_ranks import CheckpointRunner, Cost, SaveSpec
from benchmarks.engines import parameter_bytes
from benchmarks.links import Link
from benchmarks.ranks import Ranks
from benchmarks.run import available_bytes, of_ranks, quartiles
from benchmarks.savers import DCP, DCP_ASYNC, OURS, TORCH_SAVE
from zeroexp.report.markdown import wrapped

LATEST = Path("outputs/bench/checkpoints.json")
# Engine -> the ways its state is saved.
WAYS = {
    "zero2_buffer": (OURS,),
    "zero3_buffer": (OURS,),
    "fsdp2": (TORCH_SAVE, DCP, DCP_ASYNC),
}
# Times the parameters' bytes: by all ranks of all engines together, copies included.
STATES_HELD = 24
HEAD = (
    *("comparison", "engine", "saved by", "training stands still, ms", "whole, ms", "quartiles"),
    *("MB/s", "load, ms", "quartiles", "MB/s", "extra memory to save, MB", "to load, MB"),
    "written, MB",
)


@dataclass(frozen=True)
class Comparison:
    """Ways of saving one model, timed in turn in one place."""

    name: str
    model: str
    place: str = "disk"  # of PLACES
    num_rounds: int = 7


PLACES = {"disk": LATEST.parent, "memory": Path("/dev/shm")}  # the latter has no disk under it
COMPARISONS = [
    Comparison("small", "small"),
    Comparison("small_in_memory", "small", place="memory", num_rounds=5),
    Comparison("135m", "smollm2_135m", num_rounds=3),
]


def main() -> int:
    args = _arguments()
    if args.list:
        print("\n".join(str(comparison) for comparison in COMPARISONS))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was written is removed then, too
    rows: list[dict[str, Any]] = []
    for comparison in COMPARISONS:
        if comparison.name in (args.only or [comparison.name]):
            comparison = replace(comparison, num_rounds=args.rounds or comparison.num_rounds)
            rows += compare(comparison, PLACES[comparison.place])
            LATEST.parent.mkdir(parents=True, exist_ok=True)
            LATEST.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    table.tell("checkpoints", markdown(rows), [HEAD, *map(_cells, _ways(rows))], args.write)
    return 0


def compare(comparison: Comparison, place: Path) -> list[dict[str, Any]]:
    """Three rows for each way: `blocked`, `save` (both of the same turns) and `load`. None where memory lacks."""
    needed = STATES_HELD * parameter_bytes(comparison.model, "fp32")
    if needed > available_bytes():
        print(f"{comparison.name}: skipped, {needed / 1e9:.0f} GB are not free", file=sys.stderr)
        return []
    print(comparison.name, file=sys.stderr)
    load_before = os.getloadavg()[0]
    with _running(comparison, place) as engines:
        costs = _take_turns(comparison, engines)
    rows = [
        row
        for (engine, way), turns in costs.items()
        for row in _rows(comparison, engine, way, turns)
    ]
    return [{**row, "load_before": load_before} for row in rows]


@contextlib.contextmanager
def _running(comparison: Comparison, place: Path) -> Iterator[dict[str, Ranks]]:
    place.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        engines: dict[str, Ranks] = {}
        for engine, ways in WAYS.items():
            folder = tempfile.TemporaryDirectory(prefix="checkpoints-", dir=place)
            spec = SaveSpec(
                engine,
                comparison.model,
                "fp32",
                world_size=2,
                folder=Path(stack.enter_context(folder)),
                ways=ways,
            )
            engines[engine] = Ranks(spec, Link(), CheckpointRunner)
            stack.callback(engines[engine].stop)
        for ranks in engines.values():
            ranks.wait_until_ready()
        yield engines


Turns = dict[str, list[list[Cost]]]  # "save" and "load" -> one list per round of one Cost per rank


def _take_turns(comparison: Comparison, engines: dict[str, Ranks]) -> dict[tuple[str, str], Turns]:
    order = [(engine, way) for engine, ways in WAYS.items() for way in ways]
    costs: dict[tuple[str, str], Turns] = {each: {"save": [], "load": []} for each in order}
    shuffle = random.Random(0).shuffle
    for number in range(-1, comparison.num_rounds):  # the first is a warm-up
        start = time.monotonic()
        shuffle(order)
        for engine, way in order:
            for verb in ("save", "load"):
                cost = engines[engine].turn((verb, way))
                if number >= 0:
                    costs[engine, way][verb].append(cost)
        took = time.monotonic() - start
        print(f"  round {number + 1}/{comparison.num_rounds}: {took:.0f} s", file=sys.stderr)
    return costs


def _rows(comparison: Comparison, engine: str, way: str, turns: Turns) -> list[dict[str, Any]]:
    """Seconds: the slowest rank's, median over turns. Extra bytes: of the fullest rank in any turn."""
    rows: list[dict[str, Any]] = []
    for operation, verb in (("blocked", "save"), ("save", "save"), ("load", "load")):
        key = "blocked_seconds" if operation == "blocked" else "seconds"
        seconds = [max(getattr(cost, key) for cost in ranks) for ranks in turns[verb]]
        extra = [cost.extra_bytes for ranks in turns[verb] for cost in ranks]
        num_bytes = sum(cost.state_bytes for cost in turns[verb][0])
        row = {
            "comparison": comparison.name,
            "model": comparison.model,
            "place": comparison.place,
            "world_size": 2,
            "engine": engine,
            "saved_by": way,
            "operation": operation,
            "seconds": statistics.median(seconds),
            "seconds_quartiles": quartiles(seconds),
            "num_turns": len(seconds),
            "bytes": num_bytes,
            "mb_per_second": num_bytes / table.MB / statistics.median(seconds),
            "peak_extra_bytes": of_ranks(max, extra),
            "written_bytes": turns["save"][-1][0].written_bytes,
        }
        rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return what the page says: a row for each way, a column for each comparison."""
    by_comparison = {way[0]["comparison"]: way[0] for way in _ways(rows)}
    known = {(w[0]["engine"], w[0]["saved_by"], w[0]["comparison"]): _cell(*w) for w in _ways(rows)}
    ways = dict.fromkeys(name[:2] for name in known)
    head = [
        f"{name}: {first['bytes'] / table.MB:.0f} MB on {first['place']}, {first['num_turns']} turns"
        for name, first in by_comparison.items()
    ]
    lines = [[*way, *(known.get((*way, name), "") for name in by_comparison)] for way in ways]
    where = f"{table.machine()} `make bench-checkpoints`."
    return f"{wrapped(where)}\n\n{table.grid(['engine', 'saved by', *head], lines, 2)}"


def _ways(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rows of each way of each comparison: blocked, save, load."""
    key = itemgetter("comparison", "engine", "saved_by")
    return [list(way) for _, way in groupby(rows, key)]


def _cell(blocked: dict[str, Any], save: dict[str, Any], load: dict[str, Any]) -> str:
    times = "/".join(f"{1e3 * row['seconds']:.0f}" for row in (blocked, save, load))
    extra = "/".join(table.megabytes(row["peak_extra_bytes"]) for row in (save, load))
    return f"{times} ms, {extra} MB"


def _cells(way: list[dict[str, Any]]) -> list[str]:
    blocked, save, load = way
    cells = [
        save["comparison"],
        save["engine"],
        save["saved_by"],
        f"{1e3 * blocked['seconds']:.0f}",
    ]
    for row in (save, load):
        low, high = row["seconds_quartiles"]
        cells += [f"{1e3 * row['seconds']:.0f}", f"{1e3 * low:.0f}–{1e3 * high:.0f}"]
        cells += [f"{row['mb_per_second']:.0f}"]
    extra = (table.megabytes(row["peak_extra_bytes"]) for row in (save, load))
    return [*cells, *extra, table.megabytes(save["written_bytes"])]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[c.name for c in COMPARISONS], default=[])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
