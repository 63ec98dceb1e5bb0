"""What processes of tests/test_data.py do with the cache; here, since they need no import of that file."""

from __future__ import annotations

import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from zeroexp.data import packed_cache


def race(cache: Path, together: Barrier, seen: Any) -> None:
    def write(folder: Path) -> None:
        (folder / "first").write_text("x")
        time.sleep(0.5)
        (folder / f"by-{os.getpid()}").write_text("y")

    os.environ["ZEROEXP_CACHE"] = str(cache)
    together.wait()
    seen.send(sorted(path.name for path in packed_cache.cached({"test": "race"}, write).iterdir()))


def die(cache: Path) -> None:
    def write_half(folder: Path) -> None:
        (folder / "half").write_text("x")
        os._exit(9)

    os.environ["ZEROEXP_CACHE"] = str(cache)
    packed_cache.cached({"test": "kill"}, write_half)
