"""What a rank does in test_rank.py to tell what it had to import itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from zeroexp.run import rank

prepare = rank.prepare


def main(folder: Path, *, device: str) -> None:
    before = set(sys.modules)
    rank.main(folder, device=device)
    (folder / "imported.json").write_text(json.dumps(sorted(set(sys.modules) - before)))
