"""`--json`: standard output gets one object for programs, and what is said to people goes to standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator

WORD = "--json"


def wants_json() -> bool:
    """Take the word from the command line; Hydra and what comes after it need not know it."""
    wanted = WORD in sys.argv[1:]
    sys.argv[1:] = [word for word in sys.argv[1:] if word != WORD]
    return wanted


@contextlib.contextmanager
def json_alone(wanted: bool) -> Generator[list[str]]:
    """Print the text that the block puts into the list, if JSON is wanted, and nothing else on standard output."""
    told: list[str] = []
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield told
    if wanted:
        print(*(told or ["null"]), sep="\n")
