"""Verify many loops in one process: `python -m tests.verify.verify_many FILE JSON`.

JSON is a list of [function, world size], or with a limit of seconds behind them; the words of a run may stand for
the function. The output is, for each, [kind, text] of what differs, null where it is equal, or [refused, why].
"""

import json
import sys
from pathlib import Path
from typing import Any

from zeroexp.verify.__main__ import source_of
from zeroexp.verify.loop_to_verify import NoLoop
from zeroexp.verify.ranks import verify_world


def answer(file: Path, function: str, world_size: int, seconds: float = 300) -> Any:
    words = function.split() if "=" in function else [f"{file}:{function}"]
    try:
        verdict = verify_world(source_of(words), world_size, 3, seconds)
    except NoLoop as problem:
        return ["refused", str(problem)]
    found = verdict.difference
    print(
        function,
        world_size,
        round(verdict.used, 3),
        verdict.notes,
        found,
        file=sys.stderr,
        flush=True,
    )
    return [found.cause.kind, found.cause.text, found.what, found.tensor] if found else None


if __name__ == "__main__":
    asked = json.loads(sys.argv[2])
    print(json.dumps([answer(Path(sys.argv[1]).resolve(), *each) for each in asked]))
