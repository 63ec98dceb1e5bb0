"""One rank in an interpreter of its own: `-m zeroexp.cluster.rank_process <module:function> <folder> <device>`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import NoReturn

from zeroexp.cluster.exit_now import run_and_leave


def main() -> NoReturn:
    rank_main, folder, device = sys.argv[1:]
    module, _, function = rank_main.partition(":")
    run_and_leave(
        lambda: getattr(importlib.import_module(module), function)(Path(folder), device=device)
    )


if __name__ == "__main__":
    main()
