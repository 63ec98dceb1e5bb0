"""Imports of large libraries, cheaper by what they need not do."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def importing_cheaply(*without: str) -> Generator[None]:
    """Import large libraries inside: no garbage is collected meanwhile, which would be a fifth of the time.

    What they make stays as long as the process, so that no later collection looks at it either. Who imports a module of
    `without` inside finds it not installed, unless somebody has imported it before.
    """
    modules: dict[str, Any] = sys.modules
    hidden = [name for name in without if modules.setdefault(name, None) is None]
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            # Else a block inside of this one, or a thread, has imported it.
            if modules.get(name) is None:
                modules.pop(name, None)
        if collects:
            gc.freeze()
            gc.enable()
