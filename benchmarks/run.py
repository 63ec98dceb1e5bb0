"""python -m benchmarks.run: time all engines in turn, write outputs/bench/latest.json.

--quick                    one comparison: 24M, two ranks, loopback; three minutes on two cores of their own
--only NAME [NAME ...]     comparisons by name (--list prints them)
--engines NAME [...]       instead of all; `limit` and `ddp`, which ratios refer to, are always there
--write FILE               the page whose section is replaced; every row goes into benchmarks/measured/
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

from benchmarks import table, targets
from benchmarks.engines import ENGINES, ON_REQUEST, engines_for, parameter_bytes
from benchmarks.links import SHAPES, Link, open_link, payload_bytes_per_second, why_not_shaped
from benchmarks.ranks import RankFailed, Ranks, Spec, Turn
from zeroexp.measure.machine_load import busy_seconds

LATEST = Path("outputs/bench/latest.json")
REFERENCES = ("limit", "ddp")  # in every group: ratios refer to them
MiB = 1 << 20


@dataclass(frozen=True)
class Comparison:
    """Engines timed in turn under one set of circumstances."""

    name: str
    model: str
    world_size: int = 2
    link: str = "loopback"
    precision: str = "fp32"
    clip: bool = False
    num_steps: int = 5  # of a turn
    num_rounds: int = 7
    engines: tuple[str, ...] = ()  # () = all that are installed, but those ON_REQUEST


OURS = ("zero1_buffer", "zero2_buffer", "zero3_buffer")
COPIES = ("limit_copies", "limit_copies3")
OVER_SOCKETS = tuple(f"{engine}_sockets" for engine in OURS)
TORCH = ("zero_redundancy", "fsdp2_no_reshard", "fsdp2")
PEERS = (*TORCH, "deepspeed2", "deepspeed3")
ON_SLOW_LINKS = (*PEERS, *OURS, "zero3_buffer_keep_all")
COMPARISONS = [
    Comparison("quick", "small", num_steps=4, num_rounds=3),
    Comparison("small", "small", num_rounds=7),
    Comparison(
        "135m",
        "smollm2_135m",
        num_steps=3,
        num_rounds=3,
        engines=(*COPIES, *TORCH, *OURS, *OVER_SOCKETS),
    ),
    # Long turns: the link lies idle once in each, until there is a first gradient to send.
    Comparison(
        "small_1gbit",
        "small",
        link="1gbit",
        num_steps=12,
        num_rounds=3,
        engines=ON_SLOW_LINKS,
    ),
    Comparison(
        "small_bf16",
        "small",
        precision="bf16_master",
        engines=(*COPIES, "ddp_master", "fsdp2_no_reshard", "fsdp2", *OURS),
    ),
    Comparison("small_clip", "small", clip=True, engines=(*OURS, "fsdp2_no_reshard", "fsdp2")),
    Comparison("small_alone", "small", world_size=1, engines=("plain", *OURS)),
    Comparison("million_4_ranks", "million", world_size=4, num_steps=20, engines=(*PEERS, *OURS)),
    Comparison(
        "small_4_ranks", "small", world_size=4, num_rounds=4, engines=(*COPIES, *PEERS, *OURS)
    ),
    Comparison(
        "small_200mbit",
        "small",
        link="200mbit",
        num_steps=5,
        num_rounds=2,
        engines=ON_SLOW_LINKS,
    ),
]


def main() -> int:
    args = _arguments()
    if args.list:
        print("\n".join(str(comparison) for comparison in COMPARISONS))
        return 0
    rows: list[dict[str, Any]] = []
    lost: list[str] = []
    for comparison in _chosen(args):
        found = compare(comparison)
        there = {row["engine"] for row in found}
        lost += [f"{comparison.name}/{e}" for e in _asked(comparison) if found and e not in there]
        rows += found
        LATEST.parent.mkdir(parents=True, exist_ok=True)
        LATEST.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if not rows:  # each comparison was skipped, and said why
        return 1
    table.tell("speed", table.markdown(rows), table.cells(rows), args.write)
    print("Targets that are missed:", *targets.missed_lines(rows), sep="\n")
    if lost:
        print("Not in the table, for the reasons above:", *lost, file=sys.stderr)
    return 1 if lost else 0


def compare(comparison: Comparison) -> list[dict[str, Any]]:
    """Rows of all engines of the comparison, in groups that fit into memory together."""
    if comparison.link in SHAPES and (reason := why_not_shaped()):
        print(f"{comparison.name}: skipped, {reason}", file=sys.stderr)
        return []
    rows: dict[str, dict[str, Any]] = {}
    for group in _groups(comparison):
        print(f"{comparison.name}: {' '.join(group)}", file=sys.stderr, flush=True)
        for row in _compare_group(comparison, group):
            rows.setdefault(row["engine"], row)  # of a reference the first group counts
    return list(rows.values())


def _compare_group(comparison: Comparison, group: Sequence[str]) -> list[dict[str, Any]]:
    with open_link(comparison.link) as link, running(comparison, group, link) as engines:
        return rows_of(comparison, engines, payload_bytes_per_second(comparison.link))


def rows_of(
    comparison: Comparison, engines: dict[str, Ranks], capacity: float | None
) -> list[dict[str, Any]]:
    """A row of each engine that comes through all its turns; one that dies is left out."""
    began, busy = time.monotonic(), busy_seconds()
    turns, ours = _take_turns(comparison, engines)
    busy, elapsed = busy_seconds() - busy, time.monotonic() - began
    rows = [_row(comparison, engine, turns[engine]) for engine in turns]
    for row in rows:
        row["other_cores"] = max(0.0, busy - ours) / elapsed
        _add_ratios(row, {other["engine"]: other for other in rows}, capacity)
    return rows


@contextlib.contextmanager
def running(comparison: Comparison, group: Sequence[str], link: Link) -> Iterator[dict[str, Ranks]]:
    """The ranks of every engine that starts; one that does not is named and left out."""
    started: dict[str, Ranks] = {}
    try:
        for engine in group:
            spec = Spec(
                engine,
                comparison.model,
                comparison.precision,
                comparison.world_size,
                comparison.clip,
            )
            ranks = Ranks(spec, link)
            try:
                ranks.wait_until_ready()
            except RankFailed as failure:
                ranks.stop()
                if engine in REFERENCES:
                    raise
                print(failure, file=sys.stderr)
                continue
            started[engine] = ranks
        yield started
    finally:
        for ranks in started.values():
            ranks.stop()


def _take_turns(
    comparison: Comparison, engines: dict[str, Ranks]
) -> tuple[dict[str, list[list[Turn]]], float]:
    """Return by engine one list per round of one Turn per rank, and the CPU seconds of all steps that were taken.

    See [Note: a turn] of the package.
    """
    turns: dict[str, list[list[Turn]]] = {engine: [] for engine in engines}
    cpu_seconds = 0.0
    order = list(engines)
    shuffle = random.Random(0).shuffle

    def take(engine: str, num_steps: int) -> list[Turn] | None:
        """None where a rank failed, for want of memory say: its engine is named and left out from here on."""
        nonlocal cpu_seconds
        try:
            turn = engines[engine].turn(num_steps)
            cpu_seconds += num_steps * sum(rank.cpu_seconds for rank in turn)
            return turn
        except RankFailed as failure:
            if engine in REFERENCES:
                raise
            print(failure, file=sys.stderr)
            engines.pop(engine).stop()
            order.remove(engine)
            del turns[engine]
            return None

    for engine in list(order):
        take(engine, 2 if comparison.link == "loopback" else 1)  # warm-up
    for number in range(comparison.num_rounds):
        start = time.monotonic()
        shuffle(order)
        for engine in list(order):
            if turn := take(engine, comparison.num_steps):
                turns[engine].append(turn)
        took = time.monotonic() - start
        print(f"  round {number + 1}/{comparison.num_rounds}: {took:.0f} s", file=sys.stderr)
    return turns, cpu_seconds


def _row(comparison: Comparison, engine: str, rounds: list[list[Turn]]) -> dict[str, Any]:
    """What a comparison learnt about one engine. Bytes: the fullest rank's peak, the mean of what ranks sent."""
    seconds = [max(turn.step_seconds for turn in ranks) for ranks in rounds]
    last = rounds[-1]
    return {
        "comparison": comparison.name,
        "engine": engine,
        "stage": ENGINES[engine].stage,
        "model": comparison.model,
        "world_size": comparison.world_size,
        "link": comparison.link,
        "precision": comparison.precision,
        "clip": comparison.clip,
        "step_seconds": statistics.median(seconds),
        "step_seconds_quartiles": quartiles(seconds),
        "num_turns": len(seconds),
        "turn_seconds": seconds,
        "peak_bytes": of_ranks(max, [turn.peak_bytes for turn in last]),
        "allocated_bytes": of_ranks(max, [turn.allocated_bytes for turn in last]),
        "wire_bytes": of_ranks(statistics.mean, [turn.wire_bytes for turn in last]),
        "form_bytes": _form_bytes(comparison, engine, last),
    }


def quartiles(seconds: list[float]) -> list[float]:
    """The lower and the upper."""
    several = len(seconds) > 1
    lower, _, upper = (
        statistics.quantiles(seconds, n=4, method="inclusive") if several else seconds * 3
    )
    return [lower, upper]


def _form_bytes(comparison: Comparison, engine: str, ranks: list[Turn]) -> float | None:
    theory = ENGINES[engine].theory
    if theory is None:
        return of_ranks(statistics.mean, [turn.form_bytes for turn in ranks])
    if theory and comparison.precision != "fp32":
        return None  # weights and gradients are sent in dtypes of their own
    num_bytes = parameter_bytes(comparison.model, comparison.precision)
    return theory * num_bytes * (comparison.world_size - 1) / comparison.world_size


def of_ranks(choose: Any, values: list[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if len(known) == len(values) else None


def _add_ratios(row: dict[str, Any], others: dict[str, dict[str, Any]], capacity: float | None):
    """On a shaped link physics allows no less than the time its form takes to send."""
    limit = others["limit"]["step_seconds"]
    if capacity is not None and row["form_bytes"]:
        limit = max(limit, row["form_bytes"] / capacity)
    row["ratio_to_limit"] = row["step_seconds"] / limit
    row["ratio_to_ddp"] = row["step_seconds"] / others["ddp"]["step_seconds"]
    pairs = zip(row["turn_seconds"], others["ddp"]["turn_seconds"], strict=True)
    row["turns_over_ddp"] = [mine / ddp for mine, ddp in pairs]


def _groups(comparison: Comparison) -> list[list[str]]:
    """The engines cut into groups that fit into free memory beside the two references."""
    engines = [e for e in _asked(comparison) if e not in REFERENCES]
    states = 4 * parameter_bytes(comparison.model, "fp32")  # weights, gradients, two moments
    heavy = any(engine.startswith("deepspeed") for engine in engines)
    beside = (1000 if heavy else 350) * MiB  # libraries, and memory that was freed and is kept
    states *= (
        1.5 if {*COPIES} & {*engines} else 0.85
    )  # the largest part of them that a rank holds at its peak
    each = comparison.world_size * (states + beside)
    fit = max(1, int(0.8 * available_bytes() / each) - len(REFERENCES))
    return [[*REFERENCES, *engines[i : i + fit]] for i in range(0, max(1, len(engines)), fit)]


def _asked(comparison: Comparison) -> list[str]:
    """Return the engines of the comparison that are installed and mean something at its world size."""
    there = engines_for(comparison.world_size)
    every = comparison.engines or [e for e in there if e not in ON_REQUEST]
    return [e for e in every if e in there]


def available_bytes() -> int:
    words = Path("/proc/meminfo").read_text(encoding="utf-8").split()
    return int(words[words.index("MemAvailable:") + 1]) * 1024


def _chosen(args: argparse.Namespace) -> list[Comparison]:
    names = (
        ["quick"] if args.quick else args.only or [c.name for c in COMPARISONS if c.name != "quick"]
    )
    known = {comparison.name: comparison for comparison in COMPARISONS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--only {' '.join(unknown)}: no such comparison, use {', '.join(known)}")
    chosen = [known[name] for name in names]
    if gone := [name for name in args.engines if name not in engines_for(1)]:
        raise SystemExit(
            f"--engines {' '.join(gone)}: DeepSpeed is not installed here; .venv-deepspeed has it"
        )
    if args.engines:
        chosen = [replace(comparison, engines=tuple(args.engines)) for comparison in chosen]
    if args.rounds:
        chosen = [replace(comparison, num_rounds=args.rounds) for comparison in chosen]
    return chosen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=[], metavar="NAME")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
