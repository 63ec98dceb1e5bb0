"""The process that asks one planner, among its own packages: `python -m benchmarks.planners.asked MODULE`.

Points come as JSON on stdin, and answers go to stdout; what the planner prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable

from benchmarks.planners.point import Answer, CannotSay, Point


def main() -> int:
    answer = importlib.import_module(f"benchmarks.planners.{sys.argv[1]}").answer
    with contextlib.redirect_stdout(sys.stderr):
        answers = [of_point(answer, Point(**each)) for each in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)
    return 0


def of_point(answer: Callable[[Point], Answer], point: Point) -> Answer:
    """Return the answer; a planner that fails can't say, and why is its error."""
    try:
        return answer(point)
    except CannotSay as reason:
        return str(reason), str(reason)
    except Exception as error:
        reason = f"fails: {type(error).__name__}: {error}".splitlines()[0]
        return reason, reason


if __name__ == "__main__":
    sys.exit(main())
