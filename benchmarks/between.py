"""python -m benchmarks.between A B [word ...]: is B slower than A? Two checkouts or two settings, in turn, in one run.

    python -m benchmarks.between ../before .                                   # two checkouts
    python -m benchmarks.between strategy.prefetch=1 strategy.prefetch=2       # two settings
    python -m benchmarks.between ../before . model=tiny strategy=zero3 train.steps=50

A and B are folders that hold zeroexp/, or words of the command line, joined by commas. Each round runs both four times,
in an order that drifts of the machine hit alike; a round's ratio is that of the geometric means of the steps. Over
rounds it gets the interval and the verdict of every report (zeroexp/report/statistics.py): with 1 % of noise on each
run and 5 rounds, a step that is 2 % slower is found in more than 95 of 100 cases, and of 100 comparisons of equal code
at most 5 claim a difference. Exit codes: 0 not slower, 1 slower, 2 nothing was compared.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from zeroexp.report.statistics import Comparison, TimeVerdict, compare_step_times
from zeroexp.tracking.files import read_summary

NUM_ROUNDS = 5
SLOWER, WRONG = 1, 2
ORDERS = ("ABBABAAB", "BAABABBA")  # what drifts evenly or bends within a round hits both alike


def main() -> int:
    arguments, words = _arguments()
    sides = {"A": arguments.a, "B": arguments.b}
    with tempfile.TemporaryDirectory() as outputs:
        number = 0

        def run(side: str) -> float:
            nonlocal number
            number += 1
            return _step_seconds(sides[side], words, Path(outputs) / str(number))

        try:
            found = compare(run, arguments.rounds)
        except RuntimeError as error:
            print(f"benchmarks.between: {error}", file=sys.stderr)
            return WRONG
    print(f"B over A: {found.text} ({arguments.rounds} rounds)")
    return SLOWER if found.verdict is TimeVerdict.SLOWER else 0


def compare(
    run: Callable[[str], float], num_rounds: int, draw: random.Random | None = None
) -> Comparison:
    """Compare the step seconds that `run` returns for "A" and "B", in rounds of eight turns."""
    draw = draw or random.Random()
    means: dict[str, dict[int, float]] = {"A": {}, "B": {}}
    for number in range(num_rounds):
        logs: dict[str, list[float]] = {"A": [], "B": []}
        for side in draw.choice(ORDERS):
            logs[side].append(math.log(run(side)))
        for side, each in logs.items():
            means[side][number] = math.exp(fmean(each))
    found = compare_step_times(means["B"], means["A"])
    assert found is not None
    return found


def _step_seconds(side: str, words: Sequence[str], outputs: Path) -> float:
    """Run one side by its command line, and return the median seconds of its steps. Raises RuntimeError."""
    is_checkout = (Path(side) / "zeroexp").is_dir()
    checkout = Path(side if is_checkout else ".").resolve()
    own = [] if is_checkout else side.split(",")
    command = [sys.executable, "-m", "zeroexp", *words, *own, f"outputs={outputs}"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    more = ["tracking.mlflow=false"]
    ended = subprocess.run(
        [*command, *more],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    folders = [path.parent for path in outputs.glob("*/*/summary.json")]
    summary = read_summary(folders[0]) if len(folders) == 1 else None
    if ended.returncode != 0 or summary is None:
        last = (ended.stderr.strip() or "it left no results").splitlines()[-1]
        raise RuntimeError(f"{side}: {last}; give it words of one point")
    print(f"{side}: {1e3 * summary.step_seconds_median:,.1f} ms", file=sys.stderr, flush=True)
    return summary.step_seconds_median


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    return parser.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
