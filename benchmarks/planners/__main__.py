"""python -m benchmarks.planners: what each planner says of memory, beside what was measured.

--tools NAME ...     these planners alone
--points N           the first N points that are trained here
--measured           nothing is trained: the points of this machine are those that benchmarks/measured/planners.csv has
--source NAME=URL    where a planner's repository is, if not on GitHub: a URL or a folder
--write FILE         the page whose section is replaced; every answer goes into benchmarks/measured/
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

from benchmarks.planners.point import Answer, Point
from benchmarks.planners.points import measured, of_gpus, of_publications, of_this_machine
from benchmarks.planners.score import MIB, rows, table
from benchmarks.planners.tools import TOOLS
from benchmarks.table import ROWS, machine, tell
from zeroexp.process import safe_output
from zeroexp.report.markdown import wrapped

NAME = "planners"
GROUPS = {
    ("cpu",): "Points trained here, two ranks:",
    ("gpu", "published"): "Model states of the published tables, and peaks of GPUs:",
}


def main() -> int:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as torchtitan's
    safe_output.ignore_output_errors()
    args = _arguments()
    points = [*of_gpus(), *of_publications(), *own_points(args.points, args.measured)]
    said: dict[str, list[Answer]] = {}
    absent: list[str] = []
    for tool in TOOLS:
        if args.tools and tool.name not in args.tools:
            continue
        print(f"{tool.name}: asked of {len(points)} points", file=sys.stderr, flush=True)
        try:
            said[tool.name] = tool.ask(points, dict(each.split("=", 1) for each in args.source))
        except RuntimeError as error:
            absent.append(f"{tool.name} was {error}.")
    tell(NAME, told(points, said, absent), rows(points, said), args.write)
    return 0


def own_points(most: int | None, read: bool) -> list[Point]:
    """Return the points of this machine with what they took."""
    known = _known() if read else {}
    found: list[Point] = []
    for point in islice(of_this_machine(), most):
        print(f"{len(found) + 1} {point.name}", file=sys.stderr, flush=True)
        if point.name in known:
            found.append(replace(point, **known[point.name]))
        elif not read:
            found.append(measured(point))
    return found


def _known() -> dict[str, dict[str, float]]:
    """Return what each point of this machine took, by its name, from the rows behind the page."""
    found: dict[str, dict[str, float]] = {}
    with (ROWS / f"{NAME}.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["source"] == "cpu":
                found.setdefault(row["point"], {})[row["of"]] = float(row["measured, MiB"]) * MIB
    return found


def told(points: Sequence[Point], said: dict[str, list[Answer]], absent: Sequence[str]) -> str:
    """Return what the page says."""
    parts = [wrapped(machine())]
    for sources, words in GROUPS.items():
        which = [index for index, point in enumerate(points) if point.source in sources]
        if which:
            answers = {name: [each[index] for index in which] for name, each in said.items()}
            parts += [wrapped(words), table([points[index] for index in which], answers)]
    return "\n\n".join([*parts, *map(wrapped, absent)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", choices=[tool.name for tool in TOOLS], default=[])
    parser.add_argument("--points", type=int)
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--source", nargs="+", default=[], metavar="NAME=URL")
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
