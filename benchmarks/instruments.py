"""python -m benchmarks.instruments [ENGINE ...]: what measuring costs a step, as a share of it.

What is always on is counted in a real step and timed alone, in a loop, so that a busy machine does not hide it: moves
that are timed (measure/communication_overlap.py), their sum at the end of a step, allocations that are counted
(allocator.cpp). A traced step is timed beside plain ones, in turn; it counts in no time of a run.

Exit codes: 0 if what is always on takes less than 1 % of every engine's step, else 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import torch

from benchmarks import table
from benchmarks.engines import ENGINES
from benchmarks.links import open_link
from benchmarks.ranks import Ranks, Spec, Training
from zeroexp.comm.base import Pending
from zeroexp.measure.allocations import logging_allocations
from zeroexp.measure.communication_overlap import TimedMove, meter, sum_up_moves
from zeroexp.measure.trace import tracing_step
from zeroexp.process import world as worlds

DEFAULT = ["ddp_buffer", "zero2_buffer", "zero3_buffer"]
NUM_TURNS, NUM_CALLS = 9, 10_000
CPU = torch.device("cpu")
ALLOCATION_SECONDS = 20e-9  # tests/measure/test_memory.py bounds it


class CostRunner:
    """A turn answers the seconds of a plain and of a traced step, and what measuring costs of the plain one."""

    def __init__(self, spec: Spec) -> None:
        self._training = Training(spec)

    def turn(self, order: int) -> dict[str, float]:
        self._seconds()
        plain, moves = self._seconds()
        with tracing_step(self._training.strategy.model, {}, CPU):
            watched, _ = self._seconds()
        with logging_allocations(CPU) as log:
            self._training.step(drain=True)
        return {
            "step": plain,
            "traced": watched,
            "moves": len(moves),
            "allocations": len(log.blocks) if log is not None else 0,
            "move": best(one_move, NUM_CALLS),
            "sum": best(lambda: sum_up_moves(moves), NUM_CALLS // 100),
        }

    def _seconds(self) -> tuple[float, list[TimedMove]]:
        worlds.barrier()
        with meter.recording() as moves:
            began = time.perf_counter()
            self._training.step(drain=True)
            return time.perf_counter() - began, moves


def one_move() -> None:
    """Issue a move and wait for it, where there is nothing to move."""
    with meter.timing("gather", "nothing") as move:
        move.in_flight = True
        pending = Pending([])
        pending.move = move
    pending.wait()


def best(function: Callable[[], Any], num_calls: int) -> float:
    """Return the seconds of a core that one call takes in the fastest of five loops."""
    seconds: list[float] = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(num_calls):
            function()
        seconds.append((time.thread_time() - began) / num_calls)
    return min(seconds)


def measure(engines: Sequence[str], model: str, num_turns: int = NUM_TURNS) -> dict[str, Any]:
    """engine -> what a step holds and costs: medians over turns of the slower rank."""
    found: dict[str, Any] = {}
    with open_link("loopback") as link:
        for engine in engines:
            ranks = Ranks(Spec(engine, model, "fp32", 2), link, CostRunner)
            try:
                ranks.wait_until_ready()
                turns = [ranks.turn(1) for _ in range(num_turns)]
            finally:
                ranks.stop()
            worst = [{key: max(rank[key] for rank in turn) for key in turn[0]} for turn in turns]
            found[engine] = {key: statistics.median(t[key] for t in worst) for key in worst[0]}
    return found


def share(row: dict[str, float]) -> float:
    """Return the part of a step that measuring takes when nothing is traced."""
    on = row["moves"] * row["move"] + row["sum"] + row["allocations"] * ALLOCATION_SECONDS
    return on / row["step"]


def markdown(rows: dict[str, dict[str, float]]) -> str:
    head = (
        "| engine | step, ms | moves | one move, us | allocations | always on, of a step | traced step / step |\n"
        "|---|---:|---:|---:|---:|---:|---:|"
    )
    lines = [
        f"| {engine} | {1e3 * row['step']:.0f} | {row['moves']:.0f} | {1e6 * row['move']:.1f} | "
        f"{row['allocations']:.0f} | {100 * share(row):.3f} % | {row['traced'] / row['step']:.2f} |"
        for engine, row in rows.items()
    ]
    return "\n".join([table.machine(), "", head, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="*", default=DEFAULT, metavar="ENGINE")
    parser.add_argument("--model", default="small")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.engines if name not in ENGINES]:
        raise SystemExit(f"{unknown[0]}: no such engine, use {', '.join(ENGINES)}")
    rows = measure(arguments.engines, arguments.model)
    print(markdown(rows))
    return int(any(share(row) >= 0.01 for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
