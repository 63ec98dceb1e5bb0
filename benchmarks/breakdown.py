"""python -m benchmarks.breakdown [ENGINE ...]: where the milliseconds of a step go, beside those of the limit.

The functions of PARTS are timed, each without what is timed inside of it; `backward` and `forward` are then compute,
and what hooks cost. Only moves through shared memory have parts of their own: over messages they are in `other`.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

from benchmarks import table
from benchmarks.engines import ENGINES
from benchmarks.links import open_link
from benchmarks.peers import Limit
from benchmarks.ranks import Ranks, Spec, Training
from zeroexp.comm import direct
from zeroexp.comm.shared_memory import Arena, SharedChannel
from zeroexp.comm.wake_up import WakeUpPipes
from zeroexp.engines.sharded import Sharded
from zeroexp.process import world as worlds
from zeroexp.zero.step_sums import StepSums

# Part -> where its functions are found.
PARTS: dict[str, Sequence[tuple[Any, str]]] = {
    "forward": [(Training, "_loss")],
    "backward": [(Limit, "backward"), (Sharded, "backward")],
    "optimizer": [(Limit, "step"), (Sharded, "_update")],
    "norm": [(StepSums, "__init__")],
    "lay out": [(Arena, "stage")],
    "sum": [(direct, "sum_into")],
    "copy": [(SharedChannel, "copy_exposed")],
    "wait": [(WakeUpPipes, "wait_for")],
}
OTHER = "other"
DEFAULT = ["zero1_buffer", "zero2_buffer", "zero3_buffer"]
NUM_TURNS, NUM_STEPS = 9, 5


class Stopwatch:
    """Exclusive seconds by part: a part that is inside another stops the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running = [OTHER]
        self._since = time.perf_counter()

    def install(self) -> None:
        for part, places in PARTS.items():
            for owner, name in places:
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def read(self) -> dict[str, float]:
        """Since the last reading."""
        self._stop()
        read, self.seconds = self.seconds, defaultdict(float)
        return dict(read)

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._stop()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._stop()
                self._running.pop()

        return timed

    def _stop(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now


class BreakdownRunner:
    """A turn is a number of steps; it answers the milliseconds of one, by part."""

    def __init__(self, spec: Spec) -> None:
        self._watch = Stopwatch()
        self._watch.install()
        self._training = Training(spec)

    def turn(self, order: int) -> dict[str, float]:
        worlds.barrier()
        self._watch.read()
        for number in range(1, order + 1):
            self._training.step(drain=number == order)
        return {part: 1e3 * seconds / order for part, seconds in self._watch.read().items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="*", default=DEFAULT, metavar="ENGINE")
    parser.add_argument("--model", default="small")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--world-size", type=int, default=2)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.engines if name not in ENGINES]:
        raise SystemExit(f"{unknown[0]}: no such engine, use {', '.join(ENGINES)}")
    if foreign := [
        n for n in arguments.engines if not (ENGINES[n].is_ours or n.startswith("limit"))
    ]:
        raise SystemExit(f"{foreign[0]}: its parts are not timed, use one of ours or limit")
    if arguments.world_size < 1:
        raise SystemExit(f"--world-size {arguments.world_size}: use 1 or more")
    engines = ["limit", *arguments.engines]
    alike = arguments.model, arguments.precision, arguments.world_size
    print(markdown(measure(engines, *alike)))
    return 0


def measure(
    engines: Sequence[str],
    model: str,
    precision: str,
    world_size: int,
    num_turns: int = NUM_TURNS,
) -> dict[str, Any]:
    """engine -> part -> milliseconds of a step: the median over turns of the mean over ranks."""
    turns: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    with open_link("loopback") as link:
        running = {
            e: Ranks(Spec(e, model, precision, world_size), link, BreakdownRunner) for e in engines
        }
        try:
            for ranks in running.values():
                ranks.wait_until_ready()
                ranks.turn(2)  # warm-up
            for _ in range(num_turns):
                for engine, ranks in running.items():
                    turns[engine].append(_mean(ranks.turn(NUM_STEPS)))
        finally:
            for ranks in running.values():
                ranks.stop()
    return {
        engine: {part: statistics.median(turn[part] for turn in each) for part in each[0]}
        for engine, each in turns.items()
    }


def _mean(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    parts = [*PARTS, OTHER]
    return {part: statistics.mean(rank.get(part, 0.0) for rank in ranks) for part in parts}


def markdown(rows: dict[str, dict[str, float]]) -> str:
    """Milliseconds; `step` is the sum of the parts."""
    parts = [*PARTS, OTHER]
    head = f"| ms | step | {' | '.join(parts)} |\n|---|{'---:|' * (1 + len(parts))}"
    lines = [
        f"| {engine} | {sum(row.values()):.0f} | "
        + " | ".join(f"{row[p]:.1f}" for p in parts)
        + " |"
        for engine, row in rows.items()
    ]
    return "\n".join([table.machine(), "", head, *lines])


if __name__ == "__main__":
    sys.exit(main())
