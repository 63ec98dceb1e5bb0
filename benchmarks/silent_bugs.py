"""`python -m benchmarks.silent_bugs > docs/silent_bugs.md`: published silent bugs, and what `zeroexp verify` says.

Each bug of silent_loops.py is verified on its number of ranks. With names of bugs: their rows alone. It ends with 1 if
a bug is not named by its kind.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import silent_loops
from benchmarks.silent_loops import BUGS, Bug
from benchmarks.table import grid
from zeroexp.process import safe_output
from zeroexp.report.markdown import wrapped
from zeroexp.verify.loop_to_verify import source_in
from zeroexp.verify.ranks import verify_world

FILE = Path(silent_loops.__file__)
INTRODUCTION = (
    "Which silent bugs does [`zeroexp verify`](verify.md) find? In these threads training went on, the loss fell, "
    "and the result was another model. Each is rebuilt as a loop of a few lines in `benchmarks/silent_loops.py`, "
    "which the command is told nothing of; the programs of the threads were not run."
)
LEFT_OUT = (
    "Not seen: what is merely logged (radixark/miles_diffusion#35) or costs time (NVIDIA/cosmos-framework#161), and "
    "bugs of tensor, pipeline and expert parallelism, which need meshes (most of NVIDIA/Megatron-LM#7452)."
)
HEAD = ("what it was", "thread", "kind")


def main() -> int:
    safe_output.ignore_output_errors()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bugs", nargs="*", choices=[[], *BUGS])
    asked = parser.parse_args().bugs
    named = {name: bug for name, bug in BUGS.items() if name in asked or not asked}
    rows = [_row(name, bug) for name, bug in named.items()]
    missed = sum(not right for right, _ in rows)
    shown = [row for (_, row), bug in zip(rows, named.values(), strict=True) if asked or bug.thread]
    table = grid(HEAD, shown, len(HEAD))
    print(table if asked else _page(table, len(rows) - missed))
    return 1 if missed else 0


def _row(name: str, bug: Bug) -> tuple[bool, list[str]]:
    """Return whether the bug is named by its kind, and its row. Standard error has the command's whole words."""
    found = verify_world(source_in(FILE, name), bug.ranks, 3, 300).difference
    thread = f"[{bug.thread}]({bug.url})" if bug.thread else "made up"
    kind, text = (found.cause.kind, found.cause.text) if found else ("equal", "")
    print(f"{name}: {kind}: {text}", file=sys.stderr)
    return kind == bug.kind, [bug.was, thread, f"`{kind}`"]


def _page(table: str, num_named: int) -> str:
    published = sum(bool(each.thread) for each in BUGS.values())
    result = (
        f"{num_named} of {len(BUGS)} are named by their kind: these {published}, and others made up. Written on "
        f"{datetime.now(UTC):%Y-%m-%d} by `python -m benchmarks.silent_bugs > docs/silent_bugs.md` (torch "
        f"{torch.__version__})."
    )
    title = "# Silent bugs, and what finds them"
    return "\n\n".join([title, wrapped(INTRODUCTION), table, wrapped(result), wrapped(LEFT_OUT)])


if __name__ == "__main__":
    sys.exit(main())
